"""What configurations and files do not say of the families in `tiny_more.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.models import baichuan
from legato.models.config import ModelConfig
from legato.models.dummy import DummyWeights
from legato.models.registry import architecture_for
from tests.models.answers import prompts, step_logits
from tests.models.oracle import oracle_logits
from tests.models.tiny_more import tiny_baichuan, tiny_deepseek_v3
from tests.models.tiny_seeds import ORACLE, rewrite
from tests.server.local import load

SIZES = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, vocab_size=10)


def test_baichuan_2_is_known_by_its_vocabulary_and_has_a_normed_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_baichuan(tmp_path)
    monkeypatch.setattr(baichuan, "BAICHUAN_2_VOCABULARY", 320)
    ours = step_logits(load(folder), prompts(320)[:3])
    head = "lm_head.weight"
    rewrite(folder / ORACLE, lambda tensors: {**tensors, head: F.normalize(tensors[head])})
    for mine, theirs in zip(ours, oracle_logits(folder / ORACLE, prompts(320)[:3]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-4)


def test_what_predicts_a_second_token_is_not_read(tmp_path: Path) -> None:
    """The files of DeepSeek V3 have one layer more than the model."""
    folder = tiny_deepseek_v3(tmp_path)
    rewrite(folder, lambda tensors: {**tensors, "model.layers.3.eh_proj.weight": torch.zeros(2, 2)})
    load(folder)


@pytest.mark.parametrize(
    ("config", "error", "reason"),
    [
        (dict(model_type="codegen", n_head=6, rotary_dim=8), UnsupportedModel, "multiple of 4"),
        (dict(model_type="phimoe", num_experts_per_tok=3), UnsupportedModel, "two experts"),
        (dict(model_type="gpt_neo", attention_types=[[["global"], 5]]), ModelFileError, "'attention_types'"),
        (dict(model_type="dbrx", ffn_config=dict(moe_normalize_expert_weights=2)), UnsupportedModel, "not 1 or null"),
        (dict(model_type="deepseek_v3", n_group=3), UnsupportedModel, "do not make 3 groups"),
        (dict(model_type="deepseek_v3", rope_interleave=False), UnsupportedModel, "rope_interleave"),
        (
            dict(model_type="idefics3", scale_factor=1, text_config=dict(model_type="gemma")),
            UnsupportedModel,
            "'gemma'",
        ),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_said_before_weights_are_read(
    config: dict[str, object], error: type[Exception], reason: str
) -> None:
    described = ModelConfig.from_hf({**SIZES, **config})
    with pytest.raises(error, match=reason):
        architecture_for(str(config["model_type"]))(described, DummyWeights(torch.float32, torch.device("cpu")))
