"""Scales of keys and values: read under all their names, and used where the KV cache has 8 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.common.errors import ModelFileError
from legato.kernels.kv_format import KVScales, largest
from legato.layers.kv_cache import KVCache
from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest
from legato.server.prepare import prepare
from legato.server.rows import Rows
from tests.models.answers import Answers, answer, prompts
from tests.models.shards import ShardProcesses
from tests.models.tiny_cross import tiny_idefics
from tests.server.local import DEVICE, LocalServer, load
from tests.tiny_models import tiny_llama

E4M3 = torch.float8_e4m3fn
AUTOFP8 = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "dense", "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
# Keys and values of the model below, times these, are beyond 448 and of 57344, too.
K_FACTOR, V_FACTOR = 2.0**17, 2.0**18
SCALES = KVScales(K_FACTOR / 64, V_FACTOR / 64)
Names = dict[str, float]  # ending of the tensor's name behind the attention of a layer -> its number


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base"), initializer_range=0.08)


def with_scales(
    base: Path, folder: Path, config: dict[str, Any], names: Names, shape: tuple[int, ...] = (1,), large: bool = True
) -> Path:
    """The model with larger keys and values, queries and outputs smaller by as much, and scales in its checkpoint."""
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(base / "model.safetensors")
    factors = {"q_proj": 1 / K_FACTOR, "k_proj": K_FACTOR, "v_proj": V_FACTOR, "o_proj": 1 / V_FACTOR}
    for name in list(tensors):
        if large and (part := name.split(".")[-2]) in factors:
            tensors[name] *= factors[part]
        if name.endswith("q_proj.weight"):
            prefix = name.removesuffix(".q_proj.weight")
            tensors |= {f"{prefix}.{ending}": torch.full(shape, number) for ending, number in names.items()}
    save_file(tensors, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
    return folder


def by_projection(keys: float = SCALES.keys, values: float = SCALES.values) -> Names:
    return {"k_proj.k_scale": keys, "v_proj.v_scale": values}


def logits(model: CausalModel, dtype: torch.dtype, split: int) -> torch.Tensor:
    """Of a prompt that is computed in two steps, so that the second one reads keys and values of the first."""
    cache, rows = KVCache(replace(model.kv_shape, dtype=dtype), 8, 16, DEVICE), Rows(1, 4, DEVICE)
    ids = np.random.default_rng(0).integers(3, 320, 60).tolist()
    rows.admit(0, 1, ids, 0, False)
    rows.append_blocks(0, [3, 1, 4, 2])
    rows.write_blocks()
    found = []
    for count in (split, len(ids) - split):
        step = replace(prepare(rows, [rows.advance(0, count)], 16, torch.float32), logits_indices=None)
        found.append(model.logits(model.forward(step, cache)).cpu())
    return torch.cat(found)


LAYOUTS: dict[str, tuple[dict[str, Any], Names]] = {
    "autofp8": (AUTOFP8, by_projection()),
    "autofp8-one-for-both": (AUTOFP8, {"kv_scale": SCALES.values}),
    "compressed-tensors": (COMPRESSED, {"k_scale": SCALES.keys, "v_scale": SCALES.values}),
    "compressed-tensors-output": (
        COMPRESSED, {"k_proj.output_scale": SCALES.keys, "v_proj.output_scale": SCALES.values}
    ),
    "modelopt": (MODELOPT, by_projection()),
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_beyond_the_format_keep_their_logits(name: str, base: Path, tmp_path: Path) -> None:
    config, names = LAYOUTS[name]
    scaled = load(with_scales(base, tmp_path / "scaled", config, names))
    both = SCALES if len(names) == 2 else KVScales(SCALES.values, SCALES.values)
    assert scaled.kv_shape.scales == (both,) * scaled.kv_shape.num_layers
    expected = logits(load(base), torch.float32, 30)
    for split in (30, 59):
        error = (logits(scaled, E4M3, split) - expected).abs().max() / expected.std()
        assert 0 < error < 0.4
    without = load(with_scales(base, tmp_path / "without", config, {}))
    assert (logits(without, E4M3, 30) - expected).abs().max() / expected.std() > 1


@torch.inference_mode()
def test_scales_are_of_no_account_in_a_cache_of_more_bits(base: Path, tmp_path: Path) -> None:
    model = load(with_scales(base, tmp_path / "scaled", AUTOFP8, by_projection(3.0, 5.0), large=False))
    assert model.kv_shape.scales[0] == KVScales(3.0, 5.0)
    assert KVCache(model.kv_shape, 2, 16, DEVICE).layers[0].scales is None
    assert torch.equal(logits(model, torch.float32, 30), logits(load(base), torch.float32, 30))


def test_scales_of_text_layers_are_not_those_of_layers_between_them(tmp_path: Path) -> None:
    """Idefics has layers that look at images between its text layers, whose numbers in the cache they change."""
    (folder := tmp_path / "plain").mkdir()
    model = load(with_scales(tiny_idefics(folder), tmp_path / "scaled", COMPRESSED, {"k_scale": 2.0, "v_scale": 2.0}))
    cache = KVCache(replace(model.kv_shape, dtype=E4M3), 2, 16, DEVICE)
    assert all(layer.scales is None for layer in cache.layers)


@torch.inference_mode()
def test_powers_of_two_change_no_bit(base: Path, tmp_path: Path) -> None:
    """What is divided is the same number with another exponent, as long as neither end of the range is near."""
    large = load(with_scales(base, tmp_path / "large", AUTOFP8, by_projection(K_FACTOR, V_FACTOR)))
    assert torch.equal(logits(large, E4M3, 30), logits(load(base), E4M3, 30))


@pytest.mark.parametrize("kind", ["fresh", "preempted"])
def test_a_prompt_has_the_same_answer_fresh_cached_and_preempted(kind: str, base: Path, tmp_path: Path) -> None:
    model = load(with_scales(base, tmp_path / "scaled", AUTOFP8, by_projection()))

    def server(num_blocks: int) -> LocalServer:
        made = LocalServer(model, num_blocks=num_blocks, max_rows=32)
        made.engine.cache = KVCache(replace(model.kv_shape, dtype=E4M3), num_blocks, 16, DEVICE)
        return made

    numbers = np.random.default_rng(1)
    texts = [numbers.integers(3, 320, int(length)).tolist() for length in numbers.integers(17, 60, 24)]
    todo = [GenerationRequest(i, ids, 24, ignore_eos=True) for i, ids in enumerate(texts)]
    expected = server(512).run(todo)
    if kind == "preempted":
        crowded = server(40)
        assert crowded.run(todo) == expected
        assert crowded.scheduler.stats.preemptions > 0
        return
    again = server(512)
    again.run(todo)
    second = again.run([GenerationRequest(100 + i, ids, 24, ignore_eos=True) for i, ids in enumerate(texts)])
    assert [second[100 + i] for i in range(24)] == [expected[i] for i in range(24)]


def answer_in_fp8(folder: Path, requests: list[list[int]], shard: Any = None) -> Answers:
    class Small(KVCache):
        def __init__(self, shape: Any, *size: Any) -> None:
            super().__init__(replace(shape, dtype=E4M3), *size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.models.answers.KVCache", Small)
        patch.setattr("tests.server.local.KVCache", Small)
        return answer(folder, requests, shard)


def test_two_shards_answer_as_one(base: Path, tmp_path: Path, shards: ShardProcesses) -> None:
    """Also with a scale for each head: all shards take the largest."""
    folder = with_scales(base, tmp_path / "scaled", AUTOFP8, by_projection(), shape=(2, 1, 1))
    requests = prompts(320)[2:4]
    expected = answer_in_fp8(folder, requests)
    for found in shards.call(answer_in_fp8, folder, requests, world_size=2):
        assert found.tokens == expected.tokens


def test_the_largest_scale_of_the_heads_is_for_all(base: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor([0.5, 4.0])

    assert changed(base, tmp_path, change).kv_shape.scales[0] == KVScales(4.0, SCALES.values)


def test_a_scale_that_is_not_positive_is_none(base: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale")]:
            tensors[name] = torch.full((1,), -1.0)

    assert changed(base, tmp_path, change).kv_shape.scales == ()


def test_a_broken_scale_is_an_error_that_names_it(base: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.v_proj.v_scale"] = torch.tensor([float("nan")])

    with pytest.raises(ModelFileError, match=r"model.safetensors: tensor '.*1.self_attn.v_proj.v_scale' is nan"):
        changed(base, tmp_path, change)


def test_scales_of_four_bits_are_left_alone(base: Path, tmp_path: Path) -> None:
    config = {**MODELOPT, "kv_cache_quant_algo": "NVFP4"}
    assert load(with_scales(base, tmp_path / "scaled", config, by_projection())).kv_shape.scales == ()


def changed(base: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> CausalModel:
    made = with_scales(base, folder / "scaled", AUTOFP8, by_projection())
    tensors = load_file(made / "model.safetensors")
    change(tensors)
    save_file(tensors, made / "model.safetensors")
    return load(made)


def test_the_factors_are_beyond_both_formats() -> None:
    assert min(K_FACTOR, V_FACTOR) > largest(torch.float8_e5m2)
