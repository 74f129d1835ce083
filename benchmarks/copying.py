"""Weights with which a Llama of any size says a known text: what comes next depends on the last token alone.

Embeddings are random signs. The layers compute what they always compute, but add nothing: the matrices that lead back
to the hidden state (o_proj, down_proj) are zero, the others random. Row b of the LM head is the embedding of the token
before b in a circle of all tokens, so the likeliest token after a is the next one in the circle, by far: no rounding
changes it, and an answer never repeats a token.

So a benchmark can decide what a prompt has of the answer, and a step costs what it costs with real weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from legato.modelfiles.shapes import SHAPES, write_shape

SEED = 20
SIGN, ONE = 0x8000, 0x3F80  # of bfloat16
SMALLEST = ONE - (6 << 7)  # 1/64: products of 4,096 signs are sums of variance 1
MEMORY = Path("/dev/shm")


def circle(vocab_size: int) -> np.ndarray:
    """All tokens in the order in which they follow each other."""
    return np.random.default_rng(SEED).permutation(vocab_size)


def write_copying_model(name: str, folder: Path) -> Path:
    """A checkpoint of a shape. Zeros are holes in the file."""
    config = SHAPES[name]
    assert config["model_type"] == "llama" and not config["tie_word_embeddings"], f"{name} has not a Llama's layout"
    write_shape(name, folder)
    shapes = dict(_shapes(config))
    header: dict[str, Any] = {}
    end = 0
    for tensor, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        first = file.tell()
        for tensor, values in _values(config, shapes):
            file.seek(first + header[tensor]["data_offsets"][0])
            values.tofile(file)
        file.truncate(first + end)
    return folder


def place_for(name: str) -> Path | None:
    """A folder in memory, if there is room for the shape's weights; None: where temporary files are."""
    size = 2 * sum(int(np.prod(shape)) for _, shape in _shapes(SHAPES[name]))
    has_room = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1.5 * size
    return MEMORY if has_room else None


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    hidden, inner, vocab_size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", [vocab_size, hidden]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.self_attn.q_proj.weight", [queries, hidden]
        yield f"{layer}.self_attn.k_proj.weight", [keys, hidden]
        yield f"{layer}.self_attn.v_proj.weight", [keys, hidden]
        yield f"{layer}.self_attn.o_proj.weight", [hidden, queries]
        yield f"{layer}.mlp.gate_proj.weight", [inner, hidden]
        yield f"{layer}.mlp.up_proj.weight", [inner, hidden]
        yield f"{layer}.mlp.down_proj.weight", [hidden, inner]
        yield f"{layer}.input_layernorm.weight", [hidden]
        yield f"{layer}.post_attention_layernorm.weight", [hidden]
    yield "model.norm.weight", [hidden]
    yield "lm_head.weight", [vocab_size, hidden]


def _values(config: dict[str, Any], shapes: dict[str, list[int]]) -> Iterator[tuple[str, np.ndarray]]:
    """Of all tensors that are not zero, the bits of bfloat16. Layers share theirs."""
    rng, order = np.random.default_rng(SEED + 1), circle(config["vocab_size"])
    signs = _signs(rng, *shapes["model.embed_tokens.weight"])
    before = np.empty_like(order)
    before[np.roll(order, -1)] = order
    made: dict[tuple[int, ...], np.ndarray] = {}
    for tensor, shape in shapes.items():
        if tensor == "model.embed_tokens.weight":
            yield tensor, signs | ONE
        elif tensor == "lm_head.weight":
            yield tensor, signs[before] | SMALLEST
        elif tensor.endswith("norm.weight"):
            yield tensor, np.full(shape, ONE, dtype=np.uint16)
        elif not tensor.endswith(("o_proj.weight", "down_proj.weight")):
            if tuple(shape) not in made:
                made[tuple(shape)] = _signs(rng, *shape) | SMALLEST
            yield tensor, made[tuple(shape)]


def _signs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    bits = np.frombuffer(rng.bytes(2 * int(np.prod(shape))), dtype=np.uint16).reshape(shape)
    return bits & np.uint16(SIGN)
