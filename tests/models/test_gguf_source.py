"""A part of a GGUF tensor is the same as that part of the whole tensor, whatever its blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from legato.models.gguf_source import GgufSource

HEADS, KV_HEADS, HIDDEN = 4, 2, 512


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> GgufSource:
    path = Path(tmp_path_factory.mktemp("gguf")) / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    numbers = np.random.default_rng(0)
    kinds = [("attn_q", gguf.GGMLQuantizationType.Q8_0), ("ffn_down", gguf.GGMLQuantizationType.Q4_0)]
    for name, kind in kinds:
        rows = gguf.quants.quantize(numbers.standard_normal((64, HIDDEN), dtype=np.float32), kind)
        writer.add_tensor(f"blk.0.{name}.weight", rows, raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_norm.weight", numbers.standard_normal(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufSource(path)


@pytest.mark.parametrize(
    "index",
    [
        (slice(3, 17),),
        (slice(0, 64), slice(64, 256)),  # whole blocks
        (slice(5, 9), slice(40, 300)),  # within blocks
    ],
)
def test_a_part_equals_that_part_of_the_whole(source: GgufSource, index: tuple[slice, ...]) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(source.read(name, index), source.read(name, ())[index])


def test_heads_are_put_in_order_also_when_only_some_are_read(source: GgufSource) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(source.read(name, (slice(16, 48),)), source.read(name, ())[16:48])


def test_vectors_are_read_whole(source: GgufSource) -> None:
    name = "model.layers.0.post_attention_layernorm.weight"
    assert source.read(name, ()).shape == source.shape(name) == (HIDDEN,)
