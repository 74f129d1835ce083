"""Which quantization method a model has: what its files say, and what `--quantize` asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from legato.common.errors import ModelFileError, OptionError, UnsupportedModel
from legato.modelfiles.files import ModelFiles
from legato.models.keys import Keys
from legato.models.sources import TensorSource
from legato.quantization.method import DENSE, Method
from legato.quantization.on_load import QUANTIZERS
from legato.quantization.readers.gptq import GptqReader, check_bits
from legato.quantization.stored import Reader

# Methods of checkpoints that a value of --quantize stands for, beside the one of the same name.
ALSO = {
    "bitsandbytes-nf4": {"bitsandbytes"},
    "bitsandbytes-fp4": {"bitsandbytes"},
    "fp8": {"fbgemm_fp8", "modelopt"},
    "gptq": {"marlin"},
    "marlin": {"gptq", "awq"},
}


def find_method(files: ModelFiles, source: TensorSource, asked: str | None) -> Method:
    """`asked` is the value of --quantize."""
    found = files.quantization() or _from_tensors(files, source)
    if found is None:
        if asked is None:
            return DENSE
        return on_load(asked)
    file, config = found
    keys = Keys(config, file)
    name = method_name(keys)
    if asked not in (None, name) and name not in ALSO.get(str(asked), set()):
        raise OptionError(
            f"--quantize {asked}: {file} of {files.path} says that the weights are quantized with '{name}' already; "
            "omit the option"
        )
    return Method(name, READERS[name](keys, source))


def on_load(asked: str) -> Method:
    """For weights that are not quantized."""
    if asked not in QUANTIZERS:
        raise OptionError(
            f"--quantize {asked}: the model is not quantized with it (config.json has no quantization_config); "
            f"weights can be quantized on load with {', '.join(QUANTIZERS)}"
        )
    return Method(asked, quantizer=QUANTIZERS[asked])


def method_name(keys: Keys) -> str:
    name = keys.text("quant_method", default="unknown")
    if name not in READERS:
        raise UnsupportedModel(
            f"{keys.path}: quant_method '{name}' is not supported; supported: {', '.join(sorted(READERS))}"
        )
    return name


def _from_tensors(files: ModelFiles, source: TensorSource) -> tuple[str, dict[str, Any]] | None:
    """TGI's own `quantize` wrote the parameters of GPTQ as tensors."""
    if "gptq_bits" not in source.names():
        return None
    bits, size = (int(source.read(f"gptq_{name}", ()).item()) for name in ("bits", "groupsize"))
    where = source.file("gptq_bits").name
    return f"{where}, gptq_bits", {"quant_method": "gptq", "bits": bits, "group_size": size}


def _gptq(keys: Keys, source: TensorSource) -> Reader:
    bits = keys.count("bits")
    checkpoint_format = keys.text("checkpoint_format", "format", default="gptq")
    if checkpoint_format == "marlin":
        raise UnsupportedModel(f"{keys.path}: Marlin files are not supported yet")
    if checkpoint_format not in ("gptq", "gptq_v2", "gptq_p"):
        raise UnsupportedModel(f"{keys.path}: checkpoint_format '{checkpoint_format}' is not supported")
    check_bits(bits, checkpoint_format, keys.path)
    overrides = _overrides(keys.below("dynamic"))
    return GptqReader(bits, group_size(keys), checkpoint_format != "gptq", overrides)


def _overrides(keys: Keys) -> dict[str, dict[str, int]]:
    """GPTQModel's `dynamic`: regular expression -> what is different. Modules that `-:` excludes are stored dense."""
    found: dict[str, dict[str, int]] = {}
    for pattern in keys.raw:
        if not pattern.startswith("-:"):
            changes = keys.below(pattern)
            bits = {"bits": changes.count("bits")} if "bits" in changes.raw else {}
            size = {"group_size": group_size(changes)} if "group_size" in changes.raw else {}
            found[pattern.removeprefix("+:")] = bits | size
    return found


def group_size(keys: Keys) -> int:
    """Columns that share a scale; -1: all of them."""
    size = keys.number("group_size", "q_group_size", default=-1)
    if size != int(size) or (size < 1 and size != -1):
        raise ModelFileError(f"{keys.path}: 'group_size' is {size:g}, not a positive number or -1")
    return int(size)


READERS: dict[str, Callable[[Keys, TensorSource], Reader]] = {"gptq": _gptq}
