"""Converts PyTorch pickles to safetensors, once, before a model is served. Called only by `download-weights`.

A pickle is a program. `torch.load(weights_only=True)` runs the few words of it that make tensors and refuses all
others. What was written is read back and compared before it gets its name, so a file is either right or not there.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from legato.common.errors import ModelFileError, ModelNotFound
from legato.modelfiles.files import INDEX, PICKLE_SUFFIXES, has_pickles, read_json

logger = logging.getLogger(__name__)

SINGLE_PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
# What training leaves behind beside the weights, with any suffix.
NOT_WEIGHTS = {"training_args", "optimizer", "scheduler", "random_states", "rng_state"}
METADATA = {"format": "pt"}

Tensors = dict[str, torch.Tensor]


def convert(folder: Path) -> list[Path]:
    """Write what the pickles of a folder hold beside them; returns the new files."""
    pickles = find_pickles(folder)
    shared: dict[str, str] = {}  # left out -> the tensor that it is a view of, over all files
    where: dict[str, str] = {}
    written, total = [], 0
    try:
        for number, file in enumerate(pickles, 1):
            logger.info("Converting %s (%d of %d)", file.name, number, len(pickles))
            tensors, left_out = without_shared(read_pickle(file))
            target = folder / safetensors_name(file.name)
            written.append(target)
            write(target, tensors)
            shared |= left_out
            where |= dict.fromkeys(tensors, target.name)
            total += sum(tensor.nbytes for tensor in tensors.values())
        if len(pickles) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        # Half a model would look complete to the next reader.
        for file in written:
            file.unlink(missing_ok=True)
        raise
    if shared:
        kept, name = next(iter(shared.values())), next(iter(shared))
        logger.info("%d tensors share memory with others and were omitted: %s is %s", len(shared), name, kept)
    logger.info("Converted", extra={"fields": {"files": len(written), "bytes": total, "path": str(folder)}})
    return written


def find_pickles(folder: Path) -> list[Path]:
    """The files that the index names, or pytorch_model.bin, or else every .bin, or every .pt, that can be weights."""
    if (folder / PICKLE_INDEX).exists():
        files = indexed(folder)
    elif (folder / SINGLE_PICKLE).exists():
        files = [folder / SINGLE_PICKLE]
    else:
        names = pickle_names(file.name for suffix in PICKLE_SUFFIXES for file in folder.glob(f"*{suffix}"))
        files = [folder / name for name in names]
    if not files:
        raise ModelFileError(f"{folder} has no weights, neither *.safetensors nor *.bin nor *.pt")
    return files


def indexed(folder: Path) -> list[Path]:
    index = folder / PICKLE_INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index} has no weight_map; download it again")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name:
            raise ModelFileError(f"{index} names {name}, which is outside the folder")
        if not (folder / name).exists():
            raise ModelFileError(
                f"{folder / name} is missing, though {PICKLE_INDEX} names it; download the model again"
            )
    return [folder / name for name in names]


def safetensors_name(name: str) -> str:
    """As transformers names them: pytorch_model-00001-of-00002.bin is model-00001-of-00002.safetensors."""
    return f"{Path(name).stem.replace('pytorch_model', 'model')}.safetensors"


def read_pickle(file: Path) -> Tensors:
    """The named tensors of a file, on the host, mapped where its format allows that."""
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written before torch 1.6, or not torch's at all: the next one says which
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        blocked = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), None)
        if blocked is None:
            raise ModelFileError(f"{file} is not a file of tensors; download it again") from None
        raise ModelFileError(
            f"{file} is a pickle that contains more than tensors ({blocked.rstrip('.')}), and Legato runs no code from"
            " model files; ask its authors for safetensors"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ModelFileError(f"{file} cannot be read: {reason or type(error).__name__}; download it again") from None
    # Trainers wrap what they save.
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ModelFileError(f"{file} does not contain named tensors")
    return content


def without_shared(tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
    """One tensor for each memory, and which of them the others are.

    Tied weights are one memory under two names, and safetensors has no word for that. The first name in the file
    stays: modules have their embedding before their head, and loaders take the one for the other but not the reverse.
    Views of some part of a memory are tensors of their own.
    """
    same: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        same[place if tensor.numel() else (name,)].append(name)
    kept = {names[0]: tensors[names[0]] for names in same.values()}
    return kept, {name: names[0] for names in same.values() for name in names[1:]}


def write(target: Path, tensors: Tensors) -> None:
    """Under another name until every tensor has been read back and is the same."""
    unproven = target.with_name(f".{target.name}.part")
    try:
        # A copy of what is not packed, or does not have its memory for itself.
        save_file({name: alone(tensor) for name, tensor in tensors.items()}, unproven, metadata=METADATA)
        verify(unproven, tensors)
        unproven.replace(target)
    except OSError as error:
        raise ModelFileError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        unproven.unlink(missing_ok=True)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    fills = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if fills else tensor.clone(memory_format=torch.contiguous_format)


def verify(file: Path, tensors: Tensors) -> None:
    """Bit by bit: NaN is equal to itself here."""
    with safe_open(str(file), framework="pt") as stored:
        names = set(stored.keys())
        different = names ^ tensors.keys() or {
            name for name, tensor in tensors.items() if not _same(stored.get_tensor(name), tensor)
        }
    if different:
        raise ModelFileError(f"{file.name}: '{min(different)}' differs from what was written; check the disk")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def cached_snapshot(repo_id: str, revision: str | None, cache: Path | None) -> Path | None:
    """The Hub's cache counts a model without safetensors as absent when offline. This does not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(repo_id, revision=revision, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return snapshot if has_pickles(snapshot) else None


def fetch_pickles(repo_id: str, snapshot: Path) -> None:
    """Download the .bin or .pt files of the revision that `snapshot`, a folder of the Hub's cache, has the rest of."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    revision, cache = snapshot.name, snapshot.parents[2]
    try:
        names = pickle_names(HfApi().list_repo_files(repo_id, revision=revision))
        for number, name in enumerate(names, 1):
            logger.info("Downloading %s (%d of %d)", name, number, len(names))
            hf_hub_download(repo_id, name, revision=revision, cache_dir=cache)
    except OfflineModeIsEnabled:
        raise ModelNotFound(f"{repo_id}: HF_HUB_OFFLINE is set, and its weights are not in the cache") from None
    except Exception as error:  # of the HTTP library below, whose classes changed between majors
        reason = (str(error).splitlines() or [""])[0]
        raise ModelNotFound(f"{repo_id}: the download failed ({type(error).__name__}: {reason})") from None


def pickle_names(names: Iterable[str]) -> list[str]:
    """Of the files of a repository or a folder: those with the first suffix that any of them has."""
    weights = [name for name in names if "/" not in name and name.rpartition(".")[0] not in NOT_WEIGHTS]
    found = (sorted(name for name in weights if name.endswith(suffix)) for suffix in PICKLE_SUFFIXES)
    return next((names for names in found if names), [])
