"""The default on a CPU, in real processes: packed weights, the same text for a seed alone and among others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from legato.cpu.library import library
from tests.cpu.test_forward import SHAPE
from tests.integration.client import Client
from tests.integration.processes import launched
from tests.tiny_models import tiny_llama

NUM_PROMPTS = 12


def tokens(client: Client, number: int) -> list[int]:
    """Of a prompt and a seed of this number."""
    prompt = [3 + (number * 37 + place * (number + 5)) % 300 for place in range(5 + 9 * number)]
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 1.0, "seed": number, "ignore_eos": True}
    answer = client.post("/v1/completions", {**body, "logprobs": 1, "return_tokens_as_token_ids": True})
    assert answer.status == 200, answer.body
    found: list[int] = answer.json()["choices"][0]["logprobs"]["tokens"]
    assert len(found) == 24
    return found


def test_a_seed_gives_the_same_text_alone_and_among_others(tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("the CPU kernels are not built: there is no C compiler")
    model = tiny_llama(tmp_path / "model", **SHAPE)
    with launched(tmp_path, model, "--max-batch-prefill-tokens=64", exact=False) as server:
        assert "CPU kernels" in server.log
        alone = [tokens(server.client, number) for number in range(NUM_PROMPTS)]
        with ThreadPoolExecutor(NUM_PROMPTS) as clients:
            together = list(clients.map(lambda number: tokens(Client(server.port), number), range(NUM_PROMPTS)))
    assert together == alone
