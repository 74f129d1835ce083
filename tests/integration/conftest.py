"""One model and one server for the whole folder: starting them takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.client import Client
from tests.integration.processes import Launched, launched
from tests.tiny_models import tiny_llama

MAX_CONCURRENT_REQUESTS = 24
# Small steps, so that a long prompt takes a while; few tokens in the cache, so that a second long prompt must wait.
SHARED = ("--max-batch-prefill-tokens=32", "--max-batch-total-tokens=4096")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough for prompts that take many steps."""
    return tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Launched]:
    """One server for all tests that leave it as they found it."""
    with launched(
        tmp_path_factory.mktemp("server"), model, f"--max-concurrent-requests={MAX_CONCURRENT_REQUESTS}", *SHARED
    ) as running:
        yield running


@pytest.fixture
def client(server: Launched) -> Client:
    return server.client
