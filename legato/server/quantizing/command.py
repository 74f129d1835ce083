"""`text-generation-server quantize MODEL OUT`: a model's matrices in GPTQ's layout, for Legato and transformers."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from legato.common.errors import ModelFileError, OptionError, UnsupportedModel
from legato.common.logging import setup
from legato.common.progress import progress
from legato.modelfiles.files import INDEX, ModelFiles
from legato.modelfiles.locate import open_model
from legato.models.config import ModelConfig
from legato.models.decoder import Decoder
from legato.models.registry import ARCHITECTURES, architecture_for, open_source
from legato.quantization.gptq import GptqOptions
from legato.quantization.packing import word_unit
from legato.server.loading import choose_device, choose_dtype
from legato.server.quantizing.calibration import CalibratedWeights, Calibration
from legato.server.quantizing.options import QuantizeOptions

logger = logging.getLogger(__name__)

FILE_BYTES = 4 << 30
METADATA = {"format": "pt"}
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def run(options: QuantizeOptions) -> None:
    setup(options.logger_level, options.json_output, "text-generation-server")
    if options.calibration is None:
        raise OptionError("--calibration is required: a text file that resembles the model's later inputs")
    if options.output_dir is None:
        raise OptionError("OUTPUT_DIR is missing: text-generation-server quantize MODEL_ID OUTPUT_DIR")
    out = Path(options.output_dir)
    if out.exists() and any(out.iterdir()):
        raise OptionError(f"{out} is not empty; choose another folder for the quantized model")
    files = open_model(options)
    files.check_weights()
    if files.quantization() is not None:
        raise UnsupportedModel(f"{files.path} is already quantized; quantize the original model")
    gptq = GptqOptions(int(options.bits), options.group_size, options.act_order, options.sym, options.percdamp)
    sequences = calibration_ids(
        files, Path(options.calibration), options.calibration_samples, options.calibration_length
    )
    device = choose_device(options.device)
    with torch.inference_mode():
        quantize_model(files, out, gptq, sequences, device)
    logger.info("Quantized", extra={"fields": {"path": str(out), "bits": gptq.bits, "group_size": gptq.group_size}})


def calibration_ids(files: ModelFiles, text: Path, num_samples: int, length: int) -> list[list[int]]:
    """Sequences from all over the text."""
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--calibration {text}: {error}") from None
    ids = files.tokenizer().encode(content, add_special_tokens=False).ids
    whole = [ids[first : first + length] for first in range(0, len(ids) - length + 1, length)]
    if not whole:
        raise OptionError(f"--calibration {text} has {len(ids)} tokens; at least {length} are needed")
    if len(whole) < num_samples:
        logger.warning("%s has %d sequences of %d tokens, fewer than %d", text, len(whole), length, num_samples)
    step = max(1, len(whole) // num_samples)
    return whole[::step][:num_samples]


def quantize_model(
    files: ModelFiles, out: Path, options: GptqOptions, sequences: list[list[int]], device: torch.device
) -> None:
    config = ModelConfig.from_hf(files.config())
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedModel(
            f"model_type '{config.model_type}' runs through transformers and cannot be quantized here"
        )
    longest = max(map(len, sequences))
    if longest > config.max_positions:
        raise OptionError(f"--calibration-length {longest} exceeds the {config.max_positions} positions of the model")
    dtype = choose_dtype(None, files.config(), device)
    source = open_source(files)
    weights = CalibratedWeights(source, dtype, device)
    model = architecture_for(config.model_type)(config, weights)
    if not isinstance(model, Decoder):
        raise UnsupportedModel(f"model_type '{config.model_type}' is not a decoder; quantize it on load instead")
    check_shapes(weights.shapes, options)
    calibration = Calibration(model, sequences, dtype, device)
    out.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(out)
    left = source.names()
    with progress("Quantizing", len(model.layers), "layers") as advance:
        for layer in model.layers:
            for name, matrix in calibration.quantize(layer, options):
                writer.add({f"{name}.{suffix}": tensor for suffix, tensor in matrix.tensors().items()})
                left.discard(f"{name}.weight")
            advance(1)
    for name in sorted(left):
        tensor = source.read(name, ())
        writer.add({name: tensor.half() if files.weight_format == "gguf" else tensor})
        source.forget(name)
    writer.close()
    copy_files(files, out, quantization_config(options))


def check_shapes(shapes: Mapping[str, tuple[int, int]], options: GptqOptions) -> None:
    """Before hours of work: whether groups and words divide the matrices."""
    unit = word_unit(options.bits)[0]
    for name, (num_outputs, num_inputs) in shapes.items():
        if options.group_size > 0 and num_inputs % options.group_size:
            sizes = [str(size) for size in (256, 128, 64, 32, -1) if size < 0 or num_inputs % size == 0]
            raise OptionError(
                f"--group-size {options.group_size} does not divide the {num_inputs} inputs of {name};"
                f" choose {sizes[0]}"
            )
        if num_inputs % unit or num_outputs % unit:
            raise UnsupportedModel(
                f"{name} is a matrix {num_outputs} x {num_inputs}; with {options.bits} bits both must be multiples"
                f" of {unit}"
            )


def quantization_config(options: GptqOptions) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": options.bits,
        "group_size": options.group_size,
        "desc_act": options.act_order,
        "sym": options.sym,
        "damp_percent": options.damping,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "lm_head": False,
    }


class CheckpointWriter:
    """Writes tensors into files of a few gigabytes, and an index if there are several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total = 0
        self._files: list[list[str]] = []

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._pending[name] = tensor.to("cpu", copy=True).contiguous()
            self._pending_bytes += tensor.nbytes
        if self._pending_bytes >= FILE_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        count = len(self._files)
        names = ["model.safetensors"]
        if count > 1:
            names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names):
            self._part(number).rename(self._folder / name)
        if count > 1:
            where = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(where.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _part(self, number: int) -> Path:
        return self._folder / f".part-{number}"

    def _flush(self) -> None:
        if not self._pending:
            return
        try:
            save_file(self._pending, self._part(len(self._files)), metadata=METADATA)
        except OSError as error:
            raise ModelFileError(f"{self._folder} cannot be written: {error.strerror or error}") from None
        self._files.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0


def copy_files(files: ModelFiles, out: Path, quantization: dict[str, Any]) -> None:
    """Configuration and tokenizer."""
    if files.weight_format == "safetensors":
        for file in _beside_weights(files.path):
            shutil.copy(file, out / file.name)
    else:
        files.tokenizer().save(str(out / "tokenizer.json"))
        for name, content in (
            ("generation_config.json", files.generation_config()),
            ("tokenizer_config.json", files.tokenizer_config()),
        ):
            (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    config = {**files.config(), "quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _beside_weights(folder: Path) -> Iterable[Path]:
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.suffix not in NOT_COPIED and not file.name.endswith(".index.json"):
            yield file
