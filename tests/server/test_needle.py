"""Tokens of a tiny random model at context lengths around the borders of blocks, chunks, splits and waves.

A random model attends to all of its context, so one key that is missing or read twice changes its tokens. On a GPU
(`make test-gpu`) the contexts are longer than the shortest that kernels split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.models.registry import CausalModel
from tests.generation import generation
from tests.server.local import DEVICE, LocalServer, load
from tests.tiny_models import tiny_llama

ON_GPU = DEVICE.type == "cuda"
LONGEST = 9000 if ON_GPU else 700
# Of the context: blocks of 16, tiles of 64 and 128 keys, steps of 256 tokens, splits from 1,024 on.
BORDERS = [border for border in (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if border < LONGEST]
LENGTHS = sorted({max(1, border + offset) for border in BORDERS for offset in (-1, 0, 1)})
NEW = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 64}
    return tiny_llama(tmp_path_factory.mktemp("needle"), max_position_embeddings=LONGEST + 16, **shape)


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()


@pytest.fixture(scope="module")
def text() -> list[int]:
    return torch.randint(10, 90, (LONGEST,), generator=torch.Generator().manual_seed(5)).tolist()


def agrees(oracle: Any, prompt: list[int], answer: list[int]) -> bool:
    """Each token of the answer is the best one after what comes before it, up to rounding."""
    with torch.inference_mode():
        ids = torch.tensor([prompt + answer], device=DEVICE)
        logits = oracle(ids, logits_to_keep=len(answer) + 1).logits[0, :-1].double()
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(answer, device=DEVICE)[:, None])[:, 0]
    return bool((best - chosen < 1e-4).all())


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_tokens_at_every_border(model: CausalModel, oracle: Any, text: list[int], together: bool) -> None:
    """Alone, prompts come in chunks of 256 tokens. Together they are decoded in one batch of very different lengths,
    and begin with blocks of the prefix cache."""
    requests = [generation(i, text[:length], NEW, ignore_eos=True) for i, length in enumerate(LENGTHS)]
    num_blocks = sum((length + NEW) // 16 + 2 for length in LENGTHS)
    server = LocalServer(model, num_blocks=num_blocks, max_rows=len(LENGTHS), step_tokens=256, prefix_caching=together)
    for batch in [requests] if together else [[request] for request in requests]:
        server.run(batch)
    for request in requests:
        answer = server.tokens(request.id)
        assert len(answer) == NEW and agrees(oracle, list(request.input_ids), answer), (
            f"{len(request.input_ids)} tokens"
        )
