"""What transformers makes of a checkpoint: the definition of every architecture that it has, too."""

from __future__ import annotations

from pathlib import Path

import torch


def oracle_logits(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits [length, vocab] of each sequence alone, in float32 and with transformers' plainest attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([sequence]), use_cache=False).logits[0] for sequence in sequences]
