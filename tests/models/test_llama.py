"""Llama's logits against transformers', for the variations of the family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.common.errors import ModelFileError
from legato.kernels.split_linear import split_linear
from legato.layers.kv_cache import KVCache
from legato.models.decoder import SequentialLayer
from legato.models.llama import Llama
from legato.models.registry import CausalModel
from legato.quantization import dense
from legato.server.prepare import prepare
from legato.server.rows import Rows
from tests.server.local import DEVICE, load
from tests.tiny_models import tiny_llama

LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
LINEAR_ROPE = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)


def logits(model: CausalModel, ids: list[int], wanted: list[int] | None = None) -> torch.Tensor:
    """Of every position or of some, through the paged path."""
    rows = Rows(1, 64, DEVICE)
    rows.admit(0, 1, ids, 0, False)
    rows.append_blocks(0, list(range(1, 1 + -(-len(ids) // 16))))
    rows.write_blocks()
    step = prepare(rows, [rows.advance(0, len(ids))], 16, torch.float32)
    step = replace(step, logits_indices=None if wanted is None else torch.tensor(wanted, device=DEVICE))
    with torch.inference_mode():
        return model.logits(model.forward(step, KVCache(model.kv_shape, 64, 16, DEVICE))).cpu()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(num_key_value_heads=6),
        dict(num_key_value_heads=1, head_dim=32),
        dict(tie_word_embeddings=True),
        dict(attention_bias=True, mlp_bias=True),
        dict(rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0)),
        dict(rope_parameters=LLAMA3_ROPE),
        dict(rope_parameters=YARN_ROPE),
        dict(rope_parameters=LINEAR_ROPE),
        dict(rms_norm_eps=1e-3),
    ],
    ids=str,
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path, **changes)
    ids = torch.randint(3, 320, (100,), generator=torch.Generator().manual_seed(1))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = oracle(ids[None]).logits[0]
    torch.testing.assert_close(logits(load(folder), ids.tolist()), expected, rtol=1e-4, atol=1e-4)


def test_the_last_layer_goes_on_with_nothing_but_the_tokens_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, wanted = load(tiny_llama(tmp_path)), list(range(3, 60)), [0, 20, 56]
    assert isinstance(model, Llama)
    expected = logits(model, ids)[wanted]
    seen = []
    for layer in model.layers:
        assert isinstance(layer, SequentialLayer)
        monkeypatch.setattr(layer, "mlp", lambda x, mlp=layer.mlp: seen.append(len(x)) or mlp(x))
    torch.testing.assert_close(logits(model, ids, wanted), expected, rtol=1e-5, atol=1e-5)
    assert seen == [len(ids)] * (len(model.layers) - 1) + [len(wanted)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_checkpoints_are_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path, dtype=dtype)
    ids = list(range(3, 60))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(load(folder), ids), expected, rtol=1e-4, atol=1e-4)


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tiny_llama(whole)
    tiny_llama(cut)
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(cut, max_shard_size="100KB")
    (cut / "model.safetensors").unlink()
    assert len(list(cut.glob("*.safetensors"))) > 1
    ids = list(range(3, 30))
    assert torch.equal(logits(load(whole), ids), logits(load(cut), ids))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    change_tensors(tiny_llama(tmp_path), lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelFileError, match=r"no tensor 'model.layers.1.mlp.up_proj.weight'"):
        load(tmp_path)


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    change_tensors(tiny_llama(tmp_path), lambda tensors: tensors.update(stranger=torch.zeros(3)))
    with pytest.raises(ModelFileError, match="stranger"):
        load(tmp_path)


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    change_tensors(tiny_llama(tmp_path), lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    with pytest.raises(ModelFileError, match=rf"'{name}' has shape \(3, 5\), the configuration says \(32, 96\)"):
        load(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    name = "model.norm.weight"
    change_tensors(tiny_llama(tmp_path), lambda t: t.update({name: torch.zeros(96, dtype=torch.int8)}))
    with pytest.raises(ModelFileError, match=rf"'{name}' has type torch.int8"):
        load(tmp_path)


def change_tensors(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_products_in_parts_make_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    model = load(tiny_llama(tmp_path, mlp_bias=bias), dtype=torch.bfloat16)
    whole = logits(model, list(range(3, 100)))
    split = []

    def in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        split.append(weight.shape)
        return split_linear(x, weight)

    monkeypatch.setattr(dense, "pays_to_split", lambda x, weight: True)
    monkeypatch.setattr(dense, "split_linear", in_parts)
    torch.testing.assert_close(logits(model, list(range(3, 100))), whole, rtol=2e-2, atol=2e-2)
    assert len(split) == model.config.num_layers * (1 if bias else 2)
