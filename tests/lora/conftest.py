from __future__ import annotations

from pathlib import Path

import pytest

from tests.lora.tiny_adapters import ATTENTION, LINEAR, train_adapter
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that changes every linear layer, and others with all that a configuration may say."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "linear": train_adapter(base, folder / "linear", r=8, target_modules=LINEAR),
        "vocabulary": train_adapter(
            base, folder / "vocabulary", seed=1, r=20, lora_alpha=32, use_rslora=True,
            target_modules=["q_proj", "v_proj", "lm_head", "embed_tokens"],
            rank_pattern={"layers.1.self_attn.q_proj": 3}, alpha_pattern={"v_proj": 7},
        ),
        "wide": train_adapter(base, folder / "wide", seed=2, r=70, target_modules=ATTENTION),
        "narrow": train_adapter(base, folder / "narrow", seed=3, r=1, target_modules=["down_proj"]),
    }  # fmt: skip
