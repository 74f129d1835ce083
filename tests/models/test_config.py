from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.common.errors import ModelFileError, OptionError, UnsupportedModel
from legato.layers.positions import alibi_slopes
from legato.layers.rotary import RopeConfig, rope_angles
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.delta_net import DeltaShape
from legato.models.keys import Keys
from legato.models.registry import get_model
from tests.models import tiny_seeds as seeds

GPT = dict(model_type="gpt2", vocab_size=10, n_embd=12, n_head=3, n_layer=2, n_positions=32)


def test_names_of_older_architectures_are_understood() -> None:
    config = ModelConfig.from_hf(GPT)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.num_layers) == (12, 3, 3, 2)
    assert (config.head_dim, config.max_positions) == (4, 32)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda keys: keys.count("absent"), "config.json has no 'absent'"),
        (lambda keys: keys.count("word"), "config.json: 'word' is 'x', not a number from 1 to 16777216"),
        (lambda keys: keys.count("none", "word"), "'word' is 'x'"),
        (lambda keys: keys.count("zero"), "'zero' is 0, not a number from 1"),
        (lambda keys: keys.count("yes"), "'yes' is True, not a number"),
        (lambda keys: keys.number("word"), "'word' is 'x', not a number"),
        (lambda keys: keys.flag("word"), "'word' is 'x', not true or false"),
        (lambda keys: keys.text("zero"), "'zero' is 0, not a string"),
        (lambda keys: keys.texts("kinds", length=3), "'kinds' is .*, not a list of 3 strings"),
        (lambda keys: keys.below("inner").count("word"), "config.json, inner: 'word' is 'y', not a number"),
        (lambda keys: keys.below("word"), "'word' is 'x', not an object"),
    ],
)
def test_a_key_that_is_missing_or_wrong_is_named(read: Any, message: str) -> None:
    raw = {"word": "x", "zero": 0, "yes": True, "none": None, "kinds": ["a", "b"], "inner": {"word": "y"}}
    with pytest.raises(ModelFileError, match=message):
        read(Keys(raw))


def test_heads_of_delta_nets_that_do_not_divide_are_named() -> None:
    raw = {"linear_num_key_heads": 3, "linear_num_value_heads": 4}
    config = replace(ModelConfig.from_hf(GPT), keys=Keys(raw))
    with pytest.raises(ModelFileError, match=r"config.json: 'linear_num_value_heads' is 4, .*'linear_num_key_heads'"):
        DeltaShape.of(config)


def test_rope_of_both_generations_of_config_files() -> None:
    new = ModelConfig.from_hf({**GPT, "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}})
    old = ModelConfig.from_hf({**GPT, "rope_theta": 5e5, "partial_rotary_factor": 0.5})
    assert new.rope().theta == old.rope().theta == 5e5 and new.rope().dim == old.rope().dim == 2


def test_rope_of_layers_that_differ() -> None:
    kinds = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
             "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}  # fmt: skip
    config = ModelConfig.from_hf({**GPT, "rope_parameters": kinds})
    full, sliding = (config.rope(layer_type=kind) for kind in kinds)
    assert (full.theta, full.kind) == (1e6, "linear") and (sliding.theta, sliding.kind) == (1e4, "default")


def test_the_rope_option_replaces_what_the_model_says() -> None:
    config = ModelConfig.from_hf({**GPT, "rope_scaling": {"type": "linear", "factor": 2.0}})
    stretched = config.with_rope_option("dynamic", 4.0)
    assert stretched.max_positions == 128
    assert (stretched.rope().kind, stretched.rope().scaling["factor"]) == ("dynamic", 4.0)
    assert stretched.rope().trained_positions == 32


@pytest.mark.parametrize(("longest", "angles"), [(8, [7.0, 0.035]), (9, [1.75, 0.00875])])
def test_longrope_takes_the_long_divisors_where_texts_may_be_longer_than_the_original_context(
    longest: int, angles: list[float]
) -> None:
    scaling = dict(rope_type="longrope", short_factor=[1.0, 2.0], long_factor=[4.0, 8.0],
                   original_max_position_embeddings=8)  # fmt: skip
    ours, factor = rope_angles(RopeConfig(4, 10_000.0, 32, scaling), 10, longest)
    torch.testing.assert_close(ours[7], torch.tensor(angles))
    assert factor == pytest.approx((1 + 2 / 3) ** 0.5)


def test_an_incomplete_scaling_is_named() -> None:
    with pytest.raises(ModelFileError, match="rope scaling 'longrope' is incomplete or wrong"):
        rope_angles(RopeConfig(4, 10_000.0, 32, {"rope_type": "longrope"}), 10, 10)


def test_an_unknown_scaling_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="rope scaling 'spiral' is not supported; known: default"):
        rope_angles(RopeConfig(4, 10_000.0, 32, {"rope_type": "spiral"}), 10, 10)


@pytest.mark.parametrize("num_heads", [1, 8, 12, 71, 112])
def test_alibi_slopes_equal_transformers(num_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    last = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32).view(num_heads, 2)[:, 1]
    device = torch.device("cpu")
    ours = [alibi_slopes(Shard(rank, 1).heads(num_heads, num_heads, 4), device) for rank in range(1)]
    torch.testing.assert_close(torch.cat(ours), last)


def test_alibi_slopes_of_the_shards_are_those_of_the_model() -> None:
    device = torch.device("cpu")
    shares = [alibi_slopes(Shard(rank, 3).heads(12, 12, 4), device) for rank in range(3)]
    assert torch.equal(torch.cat(shares), alibi_slopes(Shard().heads(12, 12, 4), device))


@pytest.mark.parametrize("make", [seeds.tiny_bloom, seeds.tiny_gpt2], ids=["bloom", "gpt2"])
def test_rope_scaling_of_a_model_without_rope_is_refused(make: Callable[..., Path], tmp_path: Path) -> None:
    files = ModelFiles.open(make(tmp_path))
    config = ModelConfig.from_hf(files.config()).with_rope_option("linear", 2.0)
    for dummy in (False, True):
        with pytest.raises(OptionError, match=f"--rope-scaling: model_type '{config.model_type}' has no rotary"):
            get_model(files, config, torch.float32, torch.device("cpu"), dummy=dummy)
