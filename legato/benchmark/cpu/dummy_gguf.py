"""A GGUF file with random weights in the shape of a model, so that all engines can be compared at a size that nobody
wants to download. Only Llama's architecture; all matrices are Q4_1, norms are 1."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from legato.common.errors import OptionError
from legato.modelfiles.gguf.file import DEFAULT_ALIGNMENT, MAGIC, GgmlType
from legato.modelfiles.shapes import SHAPES, write_shape

VERSION = 3
# Types of metadata values: their numbers in the file.
UINT32, FLOAT32, STRING, ARRAY, INT32 = 4, 6, 8, 9, 5
SCALE = 0.01
# Random blocks that are written again and again.
NUM_BLOCKS = 1 << 16

Tensor = tuple[str, tuple[int, ...], GgmlType]


def write_dummy_gguf(name: str, folder: Path) -> Path:
    """A file of the shape `name`."""
    config = SHAPES[name]
    if config["model_type"] != "llama":
        raise OptionError(f"--model {name}: random weights in GGUF are only made for Llama's architecture")
    write_shape(name, folder)
    path = folder / f"{name}.q4_1.gguf"
    tensors, metadata = list(_tensors(config)), _metadata(name, config, folder)
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for tensor, shape, kind in tensors:
            dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            file.write(_string(tensor) + dimensions + struct.pack("<IQ", kind, offset))
            offset += _padded(_num_bytes(shape, kind))
        file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT))
        blocks = _random_blocks()
        for _, shape, kind in tensors:
            _write_data(file, shape, kind, blocks)
    return path


def _tensors(config: dict[str, Any]) -> Iterator[Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    matrix, vector = GgmlType.Q4_1, GgmlType.F32
    yield "token_embd.weight", (config["vocab_size"], hidden), matrix
    yield "output_norm.weight", (hidden,), vector
    if not config["tie_word_embeddings"]:
        yield "output.weight", (config["vocab_size"], hidden), matrix
    for layer in range(config["num_hidden_layers"]):
        for part, shape in {
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():
            yield f"blk.{layer}.{part}.weight", shape, matrix
        for part in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{part}.weight", (hidden,), vector


def _metadata(name: str, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: int(vocabulary[token]))
    tokens[-1] = tokens[0] + tokens[1]  # readers insist on a merge, and its result must be a token
    return {
        "general.architecture": "llama",
        "general.name": name,
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [f"{tokens[0]} {tokens[1]}"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type and value."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    return struct.pack("<IIQ", ARRAY, INT32, len(value)) + np.array(value, np.int32).tobytes()


def _num_bytes(shape: tuple[int, ...], kind: GgmlType) -> int:
    return int(np.prod(shape, dtype=np.int64)) // kind.block_size * kind.block_bytes


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _random_blocks() -> bytes:
    """Q4_1: scale and minimum in float16, then 32 values of four bits."""
    blocks = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, GgmlType.Q4_1.block_bytes), np.uint8)
    blocks[:, :4] = np.frombuffer(np.array([SCALE, -7.5 * SCALE], np.float16).tobytes(), np.uint8)
    return blocks.tobytes()


def _write_data(file: BinaryIO, shape: tuple[int, ...], kind: GgmlType, blocks: bytes) -> None:
    left = size = _num_bytes(shape, kind)
    if kind is GgmlType.F32:
        file.write(np.ones(shape, np.float32).tobytes())
        left = 0
    while left:
        count = min(left, len(blocks))
        file.write(blocks[:count])
        left -= count
    file.write(b"\0" * (_padded(size) - size))
