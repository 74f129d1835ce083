"""Determines the quantization method of a model, from its files and `--quantize`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from legato.common.errors import ModelFileError, OptionError, UnsupportedModel
from legato.modelfiles.files import ModelFiles
from legato.models.keys import Keys
from legato.models.sources import TensorSource
from legato.quantization.method import DENSE, Method
from legato.quantization.on_load import PRECISE_QUANTIZERS, QUANTIZERS, SMALL_QUANTIZERS
from legato.quantization.readers.awq import AwqReader
from legato.quantization.readers.bitsandbytes import BitsAndBytesReader
from legato.quantization.readers.compressed_tensors import FORMATS, PACKED, CompressedTensorsReader, TargetGroup
from legato.quantization.readers.eight_bit import EightBitReader
from legato.quantization.readers.exl2 import Exl2Reader
from legato.quantization.readers.gptq import GptqReader, check_bits
from legato.quantization.readers.marlin import MarlinReader
from legato.quantization.readers.tables import Fp4Reader, GptOssReader
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
    return Method(name, READERS[name](keys, source), has_kv_scales=_has_kv_scales(keys))


def _has_kv_scales(keys: Keys) -> bool:
    """Scales for a cache of 4 bits would take numbers beyond what 8 bits hold."""
    modelopt = keys.below("quantization") if "quantization" in keys.raw else keys
    is_fp8 = modelopt.get("kv_cache_quant_algo") in (None, "FP8", "INT8")
    scheme = keys.get("kv_cache_scheme")
    return is_fp8 and (not isinstance(scheme, dict) or scheme.get("num_bits", 8) == 8)


def on_load(asked: str) -> Method:
    """For weights that are not quantized."""
    if asked not in QUANTIZERS:
        raise OptionError(
            f"--quantize {asked}: the model is not quantized with it (config.json has no quantization_config); "
            f"weights can be quantized on load with {', '.join(QUANTIZERS)}"
        )
    return Method(
        asked,
        quantizer=QUANTIZERS[asked],
        precise_quantizer=PRECISE_QUANTIZERS.get(asked),
        small_quantizer=SMALL_QUANTIZERS.get(asked),
    )


def method_name(keys: Keys) -> str:
    # Until it had a name, bitsandbytes was the only method of transformers.
    is_unnamed = "quant_method" not in keys.raw and ("load_in_4bit" in keys.raw or "load_in_8bit" in keys.raw)
    name = keys.text("quant_method", default="bitsandbytes" if is_unnamed else "unknown")
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
    if checkpoint_format == "marlin" or keys.flag("is_marlin_format"):
        return _marlin(keys, source)
    if checkpoint_format not in ("gptq", "gptq_v2", "gptq_p"):
        raise UnsupportedModel(f"{keys.path}: checkpoint_format '{checkpoint_format}' is not supported")
    check_bits(bits, checkpoint_format, keys.path)
    overrides = _overrides(keys.below("dynamic"), checkpoint_format)
    return GptqReader(bits, group_size(keys), checkpoint_format != "gptq", keys.flag("desc_act"), overrides)


def _overrides(keys: Keys, checkpoint_format: str) -> dict[str, dict[str, int]]:
    """GPTQModel's `dynamic`: regular expression -> what is different. Modules that `-:` excludes are stored dense."""
    found: dict[str, dict[str, int]] = {}
    for pattern in keys.raw:
        if not pattern.startswith("-:"):
            changes = keys.below(pattern)
            bits = {"bits": changes.count("bits")} if "bits" in changes.raw else {}
            size = {"group_size": group_size(changes)} if "group_size" in changes.raw else {}
            for number in bits.values():
                check_bits(number, checkpoint_format, changes.path)
            found[regular_expression(pattern.removeprefix("+:"), keys.path)] = bits | size
    return found


def regular_expression(pattern: str, where: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelFileError(f"{where}: '{pattern}' is not a regular expression: {error}") from None
    return pattern


def group_size(keys: Keys) -> int:
    """Columns that share a scale; -1: all of them."""
    size = keys.number("group_size", "q_group_size", default=-1)
    if size != int(size) or (size < 1 and size != -1):
        raise ModelFileError(f"{keys.path}: 'group_size' is {size:g}, not a positive number or -1")
    return int(size)


def _marlin(keys: Keys, source: TensorSource) -> Reader:
    if (bits := keys.count("bits", default=4)) != 4:
        raise UnsupportedModel(f"{keys.path}: Marlin files with {bits} bits are not supported; supported: 4")
    if keys.text("checkpoint_format", default="marlin") == "marlin_24" or any(
        name.endswith(".B_24") for name in source.names()
    ):
        raise UnsupportedModel(f"{keys.path}: sparse Marlin files ('marlin_24') are not supported")
    return MarlinReader(group_size(keys))


def _awq(keys: Keys, source: TensorSource) -> Reader:
    if (bits := keys.count("bits", "w_bit", default=4)) != 4:
        raise UnsupportedModel(f"{keys.path}: AWQ with {bits} bits is not supported; supported: 4")
    version = keys.text("version", default="gemm").lower()
    if version not in ("gemm", "gemv"):
        raise UnsupportedModel(f"{keys.path}: AWQ version '{version}' is not supported; supported: gemm, gemv")
    return AwqReader(group_size(keys), version)


def _fp8(keys: Keys, source: TensorSource) -> Reader:
    return EightBitReader(_block(keys, "weight_block_size"))


def _block(keys: Keys, name: str) -> tuple[int, int] | None:
    block = keys.get(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ModelFileError(f"{keys.path}: '{name}' is {block!r}, not two positive numbers")
    return block[0], block[1]


def _modelopt(keys: Keys, source: TensorSource) -> Reader:
    keys = keys.below("quantization") if "quantization" in keys.raw else keys
    if keys.get("quant_algo") is None and keys.get("kv_cache_quant_algo") is not None:
        return EightBitReader()  # matrices are dense
    algorithm = keys.text("quant_algo")
    if algorithm == "NVFP4":
        return Fp4Reader("weight", global_scale="weight_scale_2")
    if algorithm not in MODELOPT:
        supported = ", ".join([*MODELOPT, "NVFP4"])
        raise UnsupportedModel(f"{keys.path}: quant_algo '{algorithm}' is not supported; supported: {supported}")
    return EightBitReader(MODELOPT[algorithm])


def _compressed_tensors(keys: Keys, source: TensorSource) -> Reader:
    overall = keys.text("format", default="dense")
    groups = []
    for name in keys.below("config_groups").raw:
        group = keys.below("config_groups").below(name)
        weights = group.below("weights")
        stored = group.text("format", default=overall)
        if stored not in FORMATS:
            raise UnsupportedModel(f"{group.path}: format '{stored}' is not supported; supported: {', '.join(FORMATS)}")
        bits = weights.count("num_bits")
        if stored == PACKED and bits > 8:
            raise UnsupportedModel(f"{weights.path}: '{PACKED}' with {bits} bits is not supported; supported: 2 to 8")
        targets = tuple(str(target) for target in group.get("targets") or [])
        for target in targets:
            if target.startswith("re:"):
                regular_expression(target[3:], group.path)
        groups.append(TargetGroup(targets, stored, bits, _block(weights, "block_structure")))
    if not groups and keys.get("kv_cache_scheme") is None:  # with it matrices may be dense
        raise ModelFileError(f"{keys.path} has no 'config_groups'")
    return CompressedTensorsReader(groups)


def _mxfp4(keys: Keys, source: TensorSource) -> Reader:
    return GptOssReader()


def _bitsandbytes(keys: Keys, source: TensorSource) -> Reader:
    return BitsAndBytesReader()


def _exl2(keys: Keys, source: TensorSource) -> Reader:
    return Exl2Reader()


MODELOPT = {"FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": None, "FP8_PB_WO": (128, 128)}
READERS: dict[str, Callable[[Keys, TensorSource], Reader]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "exl2": _exl2,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "marlin": _marlin,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
