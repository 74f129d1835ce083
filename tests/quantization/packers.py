"""Writers of the published layouts of quantized checkpoints, in numpy, independent of Legato's readers.

Each takes a matrix [out, in] and returns the tensors that a checkpoint has for it and the numbers that they stand for.
Quantization is round to nearest: it is the layout that matters here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray
Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, Array]  # suffix of the name -> tensor; the dequantized matrix
GROUP = 64


@dataclass(frozen=True)
class Layout:
    """A format: the configuration, and how a matrix becomes tensors. `name` is that of the module."""

    config: dict[str, Any]
    pack: Callable[[str, Array], Packed]
    file: str = "config.json"  # where the configuration is written


def bit_stream(values: Array, bits: int) -> Array:
    """[..., count] -> [..., count·bits/32] int32, little-endian along the last dimension."""
    binary = (values[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
    binary = binary.reshape(*values.shape[:-1], -1, 32)
    return (binary << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


def as_tensors(**arrays: Array | torch.Tensor) -> Tensors:
    return {
        name: array if isinstance(array, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(array))
        for name, array in arrays.items()
    }


def integers(w: Array, bits: int, index: Array, sym: bool) -> tuple[Array, Array, Array]:
    """Codes [out, in], scales [out, groups] fp16 and zeros [out, groups], by the group of each input."""
    top = (1 << bits) - 1
    num_groups = index.max() + 1
    scales, zeros, codes = np.empty((len(w), num_groups)), np.empty((len(w), num_groups)), np.empty(w.shape)
    for group in range(num_groups):
        part = w[:, index == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if sym:
            high = np.maximum(high, -low)
            low = -high
        scale = np.maximum((high - low) / top, 1e-4).astype(np.float16).astype(np.float64)
        zero = np.full(len(w), (top + 1) / 2) if sym else np.clip(np.round(-low / scale), 0, top)
        scales[:, group], zeros[:, group] = scale, zero
        codes[:, index == group] = np.clip(np.round(part / scale[:, None]) + zero[:, None], 0, top)
    return codes.astype(np.int64), scales.astype(np.float16), zeros.astype(np.int64)


def dequantized(codes: Array, scales: Array, zeros: Array, index: Array) -> Array:
    return (codes - zeros[:, index]) * scales.astype(np.float32)[:, index]


def act_order(num_inputs: int, size: int, seed: int) -> Array:
    """The groups of the inputs where those with large activations come first."""
    order = np.random.default_rng(seed).permutation(num_inputs)
    index = np.empty(num_inputs, dtype=np.int64)
    index[order] = np.arange(num_inputs) // size
    return index


def gptq(
    bits: int = 4, *, group: int = GROUP, desc_act: bool = False, sym: bool = True, v2: bool = False,
    file: str = "config.json", tensors: bool = False, zero_index: bool = False,
) -> Layout:  # fmt: skip
    def pack(name: str, w: Array) -> Packed:
        num_inputs = w.shape[1]
        size = group if group > 0 else num_inputs
        # q, k and v of a layer read the same inputs, and so have the same order; one layer's have not.
        index = act_order(num_inputs, size, hash_of(name)) if desc_act else np.arange(num_inputs) // size
        codes, scales, zeros = integers(w, bits, index, sym)
        stored = zeros if v2 else (zeros - 1) & ((1 << bits) - 1)
        found = as_tensors(
            qweight=np.ascontiguousarray(bit_stream(codes, bits).T),
            qzeros=bit_stream(np.ascontiguousarray(stored.T), bits),
            scales=scales.T,
            g_idx=(np.zeros_like(index) if zero_index else index).astype(np.int32),
        )
        return found, dequantized(codes, scales, zeros, index)

    config: dict[str, Any] = dict(bits=bits, group_size=group, desc_act=desc_act, sym=sym)
    if tensors:
        return Layout(config, pack, "tensors")
    if file == "config.json":
        config |= {"quant_method": "gptq", "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    return Layout(config, pack, file)


def gptq_dynamic() -> Layout:
    """GPTQModel's `dynamic`: some modules in other widths and groups, some not quantized."""
    most, wider = gptq(), gptq(8, group=32)

    def pack(name: str, w: Array) -> Packed:
        if name.endswith("o_proj"):
            return {"weight": torch.from_numpy(w).float()}, w
        return (wider if name.endswith(("v_proj", "down_proj")) else most).pack(name, w)

    changes = {"bits": 8, "group_size": 32}
    dynamic = {r"+:.*\.v_proj": changes, r".*\.1\.mlp\.down_proj": changes, r"+:.*\.0\.mlp\.down_proj": changes}
    return Layout({**most.config, "dynamic": {**dynamic, r"-:.*\.o_proj": {}}}, pack)


def hash_of(name: str) -> int:
    """The same for q and k, and for gate and up, so that some products are one and others are not."""
    return sum(name.replace("k_proj", "q_proj").replace("up_proj", "gate_proj").encode())


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i has output AWQ_ORDER[i] of eight


def awq_words(values: Array) -> Array:
    """[rows, count] -> [rows, count / 8] int32."""
    eight = values.reshape(len(values), -1, 8)[..., list(AWQ_ORDER)].astype(np.uint32)
    return (eight << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def awq(version: str = "gemm", *, group: int = GROUP, file: str = "config.json") -> Layout:
    def pack(name: str, w: Array) -> Packed:
        index = np.arange(w.shape[1]) // group
        codes, scales, zeros = integers(w, 4, index, sym=False)
        values = dequantized(codes, scales, zeros, index)
        if version == "gemm":
            found = as_tensors(qweight=awq_words(codes.T), qzeros=awq_words(zeros.T), scales=scales.T)
            return found, values
        missing = -zeros.shape[1] % 8
        padded = as_tensors(
            qweight=bit_stream(codes, 4),
            qzeros=bit_stream(np.pad(zeros, ((0, 0), (0, missing))), 4),
            scales=np.pad(scales, ((0, 0), (0, missing))),
        )
        return padded, values

    if file == "config.json":
        return Layout(dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version=version), pack)
    return Layout(dict(w_bit=4, q_group_size=group, zero_point=True, version=version.upper()), pack, file)


def compressed(weights: dict[str, Any], stored: str, pack: Callable[[str, Array], Packed], **more: Any) -> Layout:
    group = {"targets": ["Linear"], "weights": weights, **more}
    config = {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}
    return Layout({**config, "ignore": ["lm_head"]}, pack)


def packed_integers(bits: int = 4, *, group: int = GROUP, sym: bool = True, act_ordered: bool = False) -> Layout:
    def pack(name: str, w: Array) -> Packed:
        size = group if group > 0 else w.shape[1]
        index = act_order(w.shape[1], size, hash_of(name)) if act_ordered else np.arange(w.shape[1]) // size
        codes, scales, zeros = integers(w, bits, index, sym)
        found = as_tensors(
            weight_packed=bit_stream(codes, bits), weight_scale=scales, weight_shape=np.array(w.shape, dtype=np.int64)
        )
        if not sym:
            found |= as_tensors(weight_zero_point=bit_stream(np.ascontiguousarray(zeros.T), bits).T)
        if act_ordered:
            found |= as_tensors(weight_g_idx=index.astype(np.int32))
        return found, dequantized(codes, scales, zeros, index)

    strategy = "group" if group > 0 else "channel"
    weights = dict(num_bits=bits, type="int", symmetric=sym, strategy=strategy, group_size=group if group > 0 else None)
    return compressed(weights, "pack-quantized", pack)


def several_groups() -> Layout:
    """compressed-tensors: values in fp8, the second layer's last matrix in 8-bit integers, all others in 4 bits."""
    kinds = [packed_integers(), fp8("row", method="compressed-tensors"), w8a8()]
    targets = [["Linear"], [r"re:.*\.v_proj$"], ["layers.1.mlp.down_proj"]]
    found = [layout.config["config_groups"]["group_0"] | {"format": layout.config["format"]} for layout in kinds]
    groups = {
        f"group_{i}": {**group, "targets": names} for i, (group, names) in enumerate(zip(found, targets, strict=True))
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}

    def pack(name: str, w: Array) -> Packed:
        return kinds[1 if "v_proj" in name else 2 if name.endswith("1.mlp.down_proj") else 0].pack(name, w)

    return Layout(config, pack)


def int8_rows(w: Array) -> tuple[Array, Array]:
    scale = (np.abs(w).max(1, keepdims=True) / 127).astype(np.float32)
    return np.clip(np.round(w / scale), -127, 127).astype(np.int8), scale


def w8a8() -> Layout:
    def pack(name: str, w: Array) -> Packed:
        numbers, scale = int8_rows(w)
        return as_tensors(weight=numbers, weight_scale=scale), numbers * scale

    weights = dict(num_bits=8, type="int", symmetric=True, strategy="channel")
    activations = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    return compressed(weights, "int-quantized", pack, input_activations=activations)


def fp8_numbers(w: Array, scale: Array) -> tuple[torch.Tensor, Array]:
    numbers = torch.from_numpy(w / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers, numbers.float().numpy() * scale


def fp8(
    scales: str = "tensor", *, method: str = "fp8", static: bool = False, block: tuple[int, int] = (32, 64),
    kv_scales: bool = False,
) -> Layout:  # fmt: skip
    """`scales` by tensor, by row or by block."""

    def pack(name: str, w: Array) -> Packed:
        if scales == "block":
            rows, columns = block
            padded = np.pad(w, ((0, -w.shape[0] % rows), (0, -w.shape[1] % columns)))
            tiles = padded.reshape(-(-w.shape[0] // rows), rows, -1, columns)
            scale = (np.abs(tiles).max((1, 3)) / 448).astype(np.float32)
            wide = np.repeat(np.repeat(scale, rows, 0), columns, 1)[: w.shape[0], : w.shape[1]]
            ending = "weight_scale_inv" if method == "fp8" else "weight_scale"
            stored = scale[:, None, :, None] if method == "modelopt" else scale
        else:
            wide = np.abs(w).max(1 if scales == "row" else None, keepdims=True).astype(np.float32) / np.float32(448)
            ending, stored = "weight_scale", wide if scales == "row" else wide.reshape(1)
        numbers, values = fp8_numbers(w, wide)
        found = as_tensors(weight=numbers, **{ending: stored})
        if static:
            found |= as_tensors(input_scale=np.ones(1, dtype=np.float32))
        if kv_scales and name.endswith(("k_proj", "v_proj")):
            found |= as_tensors(**{f"{name[-6]}_scale": np.full(1, 0.5, dtype=np.float32)})
        return found, values

    if method == "compressed-tensors":
        strategy = {"tensor": "tensor", "row": "channel", "block": "block"}[scales]
        weights = dict(num_bits=8, type="float", symmetric=True, strategy=strategy)
        if scales == "block":
            weights["block_structure"] = list(block)
        activations = dict(num_bits=8, type="float", dynamic=not static)
        return compressed(weights, "float-quantized", pack, input_activations=activations)
    if method == "modelopt":
        algorithm = {"tensor": "FP8", "row": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}[scales]
        config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
        return Layout(config, pack, "hf_quant_config.json")
    config = dict(quant_method=method, activation_scheme="static" if static else "dynamic")
    return Layout({**config, "weight_block_size": list(block)} if scales == "block" else config, pack)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
FP4 = np.array([0, 0.0052083334885537624, 0.6666666865348816, 1, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25])
FP4 = np.concatenate([FP4, -FP4])


def nearest(numbers: Array, table: Array) -> Array:
    return np.abs(numbers[..., None] - table).argmin(-1)


def fp4(kind: str = "mxfp4") -> Layout:
    size = 32 if kind == "mxfp4" else 16

    def pack(name: str, w: Array) -> Packed:
        largest = np.abs(w.reshape(len(w), -1, size)).max(2)
        if kind == "mxfp4":
            exponent = np.ceil(np.log2(largest / 6))
            scale, more = 2.0**exponent, as_tensors(weight_scale=(exponent + 127).astype(np.uint8))
        else:
            whole = np.float32(largest.max() / 6 / 448)
            stored = torch.from_numpy(largest / 6 / whole).to(torch.float8_e4m3fn)
            scale = stored.float().numpy() * whole
            if kind == "nvfp4":
                scale = stored.float().numpy() / (1 / whole)
                more = as_tensors(weight_scale=stored, weight_global_scale=np.array([1 / whole], dtype=np.float32))
            else:
                more = as_tensors(weight_scale=stored, weight_scale_2=np.array(whole, dtype=np.float32))
        wide = np.repeat(np.maximum(scale, 1e-30), size, 1)
        codes = nearest(w / wide, E2M1)
        packed = (codes[:, 1::2] << 4 | codes[:, ::2]).astype(np.uint8)
        name_of_codes = "weight" if kind == "modelopt" else "weight_packed"
        return as_tensors(**{name_of_codes: packed}) | more, E2M1[codes] * np.repeat(scale, size, 1)

    if kind == "modelopt":
        return Layout({"quant_method": "modelopt", "quant_algo": "NVFP4"}, pack)
    return compressed(dict(num_bits=4, type="float", strategy="group"), f"{kind}-pack-quantized", pack)


def bitsandbytes(kind: str = "nf4", *, double: bool = False, storage: torch.dtype = torch.uint8) -> Layout:
    table = NF4 if kind == "nf4" else FP4

    def pack(name: str, w: Array) -> Packed:
        if kind == "int8":
            numbers, scale = int8_rows(w)
            found = as_tensors(
                weight=numbers, SCB=(scale[:, 0] * 127).astype(np.float32), weight_format=np.array(0, dtype=np.uint8)
            )
            return found, numbers * scale
        blocks = w.reshape(-1, 64)
        absmax = np.abs(blocks).max(1).astype(np.float32)
        codes = nearest(blocks / absmax[:, None], table)
        state: dict[str, Any] = dict(quant_type=kind, blocksize=64, dtype="float32", shape=list(w.shape))
        more: dict[str, Array] = {}
        stored = absmax
        if double:
            nested_map = np.linspace(-1, 1, 256).astype(np.float32)
            offset = float(np.float32(absmax.mean()))
            pieces = np.array_split(absmax - np.float32(offset), range(256, len(absmax), 256))
            scales = np.array([np.abs(piece).max() for piece in pieces], dtype=np.float32)
            stored = np.concatenate([nearest(p / s, nested_map) for p, s in zip(pieces, scales, strict=True)])
            stored = stored.astype(np.uint8)
            absmax = nested_map[stored] * np.repeat(scales, 256)[: len(stored)] + np.float32(offset)
            state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=offset)
            more = {"weight.nested_absmax": scales, "weight.nested_quant_map": nested_map}
        flat = codes.reshape(-1)
        packed = torch.from_numpy((flat[::2] << 4 | flat[1::2]).astype(np.uint8)).view(storage)[:, None]
        described = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8).copy()
        found = as_tensors(weight=packed) | as_tensors(**{
            "weight.absmax": stored, "weight.quant_map": table.astype(np.float32),
            f"weight.quant_state.bitsandbytes__{kind}": described, **more,
        })  # fmt: skip
        return found, (table[codes].astype(np.float32) * absmax[:, None]).reshape(w.shape)

    bits = {"load_in_8bit": kind == "int8", "load_in_4bit": kind != "int8"}
    return Layout({"quant_method": "bitsandbytes", **bits, "bnb_4bit_quant_type": kind}, pack)


def exl2() -> Layout:
    """Groups of 32 inputs, those of the first ones with more bits."""

    def pack(name: str, w: Array) -> Packed:
        num_outputs, num_inputs = w.shape
        order = np.random.default_rng(hash_of(name)).permutation(num_inputs)
        widths = [8, 6, 5, 4, 3, 2] if num_inputs == 192 else [5, 4, 4, 3]
        padded = np.pad(w, ((0, -num_outputs % 32), (0, 0)))[:, order]
        words, table, codes_of_scales, largest, values, row = [], [], [], [], np.empty(padded.shape), 0
        for group, bits in enumerate(widths):
            part = padded[:, group * 32 : group * 32 + 32]
            needed = np.abs(part).max(1) / (2 ** (bits - 1) - 0.5)
            most = np.float16(needed.max())
            code = np.clip(np.ceil(np.sqrt(needed / float(most) * 256)) - 1, 0, 15).astype(np.int64)
            scale = ((code + 1) ** 2 * (np.float32(most) / 256)).astype(np.float16).astype(np.float32)[:, None]
            q = np.clip(np.round(part / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype(np.int64)
            values[:, group * 32 : group * 32 + 32] = q * scale
            words.append(bit_stream(q + 2 ** (bits - 1), bits).T)
            table += [bits, row]
            row += bits
            codes_of_scales.append(bit_stream(code, 4))
            largest.append(most)
        inverse = np.empty(num_inputs, dtype=np.int32)
        inverse[order] = np.arange(num_inputs)
        found = as_tensors(
            q_weight=np.concatenate(words), q_groups=np.array(table, dtype=np.int16), q_scale=np.stack(codes_of_scales),
            q_scale_max=np.array(largest, dtype=np.float16), q_invperm=inverse,
        )  # fmt: skip
        return found, values[:num_outputs][:, inverse]

    return Layout({"quant_method": "exl2", "bits": 4.0}, pack)


def marlin(*, group: int = GROUP, method: str = "gptq") -> Layout:
    """As Marlin's own packing has it: tiles of 16 x 16, a permutation of 1,024 codes, an interleaved word."""
    order = []
    for i in range(32):
        rows = [2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1]
        some = [16 * row + i // 4 + 8 * half for half in (0, 1) for row in rows]
        order += [place + 256 * j for j in range(4) for place in some]
    permutation = np.array(order).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    single = [2 * i + j for i in range(4) for j in [0, 1, 8, 9, 16, 17, 24, 25]]

    def pack(name: str, w: Array) -> Packed:
        num_outputs, num_inputs = w.shape
        size = group if group > 0 else num_inputs
        index = np.arange(num_inputs) // size
        codes, scales, zeros = integers(w, 4, index, sym=True)
        tiles = codes.T.reshape(num_inputs // 16, 16, num_outputs // 16, 16).transpose(0, 2, 1, 3)
        tiles = tiles.reshape(num_inputs // 16, num_outputs * 16)
        permuted = tiles.reshape(-1, 1024)[:, permutation].reshape(tiles.shape).astype(np.uint32)
        words = np.zeros((tiles.shape[0], tiles.shape[1] // 8), dtype=np.uint32)
        for i in range(8):
            words |= permuted[:, i::8] << np.uint32(4 * i)
        lanes = grouped if size < num_inputs else single
        stored = scales.T.reshape(-1, len(lanes))[:, lanes].reshape(-1, num_outputs)
        found = as_tensors(B=words.view(np.int32), s=stored)
        return found, dequantized(codes, scales, zeros, index)

    if method == "marlin":
        return Layout(dict(quant_method="marlin", group_size=group), pack)
    return Layout(dict(quant_method="gptq", bits=4, group_size=group, checkpoint_format="marlin"), pack)
