"""MPT's options: the reference that defines them, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.common.errors import LegatoError, ModelFileError, UnsupportedModel
from legato.models.config import ModelConfig
from legato.models.dummy import DummyWeights
from legato.models.mpt import MPT
from tests.models.answers import prompts
from tests.models.mpt_reference import mpt_logits
from tests.models.oracle import oracle_logits
from tests.models.tiny_seeds import tiny_mpt

SIZES = dict(model_type="mpt", d_model=32, n_heads=2, n_layers=1, vocab_size=64)


def test_the_reference_equals_transformers_where_transformers_has_the_option(tmp_path: Path) -> None:
    folder = tiny_mpt(tmp_path, attn_config=dict(clip_qkv=1.5, softmax_scale=0.3))
    asked = prompts(320)
    for ours, theirs in zip(mpt_logits(folder, asked), oracle_logits(folder, asked), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        (dict(attn_config=dict(rope=True)), UnsupportedModel, "'rope'"),
        (dict(attn_config=dict(prefix_lm=True)), UnsupportedModel, "'prefix_lm'"),
        (dict(attn_config=dict(qk_gn=True)), UnsupportedModel, "'qk_gn'"),
        (dict(attn_config=dict(sliding_window_size=128)), UnsupportedModel, "'sliding_window_size'"),
        (dict(attn_config=dict(attn_type="other")), UnsupportedModel, "'other'"),
        (dict(norm_type="rmsnorm"), UnsupportedModel, "'rmsnorm'"),
        (dict(logit_scale="twice"), ModelFileError, "'twice'"),
    ],
)
def test_an_option_that_is_not_served_is_refused_by_name(
    changes: dict[str, Any], error: type[LegatoError], named: str
) -> None:
    config = ModelConfig.from_hf({**SIZES, **changes})
    with pytest.raises(error, match=named):
        MPT(config, DummyWeights(torch.float32, torch.device("cpu")))
