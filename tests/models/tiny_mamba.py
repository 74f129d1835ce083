"""Tiny random checkpoints of models that keep states, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.tiny_seeds import write


def tiny_mamba(folder: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = dict(
        hidden_size=96, num_hidden_layers=3, state_size=8, conv_kernel=4, expand=2, time_step_rank=5, pad_token_id=0,
        spread=0.2,
    )  # fmt: skip
    return write(folder, "mamba", settings, changes)
