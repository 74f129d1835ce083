"""Two network namespaces as two machines, for `make test-nodes`. They say why if there can be none here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from benchmarks.machines import Namespaces, missing_for_namespaces
from benchmarks.nodes import expected_tokens, prompts
from tests.tiny_models import tiny_llama

NUM_STREAMS, NUM_TOKENS = 8, 120


@pytest.fixture(scope="session")
def network() -> Iterator[Namespaces]:
    if (missing := missing_for_namespaces()) is not None:
        pytest.skip(f"not tested: {missing}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with Namespaces() as made:
        yield made


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Small, so that machines can be started often."""
    return str(tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=4096))


@pytest.fixture(scope="session")
def words(model: str) -> list[str]:
    return [f"--model-id={model}", "--dtype=float32"]


@pytest.fixture(scope="session")
def expected(words: list[str]) -> list[list[int]]:
    """What one process answers to `prompts`."""
    return expected_tokens(words, prompts(NUM_STREAMS), NUM_TOKENS)[0]
