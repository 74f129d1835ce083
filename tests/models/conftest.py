from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.shards import ShardProcesses


@pytest.fixture(scope="session")
def shards() -> Iterator[ShardProcesses]:
    with ShardProcesses() as processes:
        yield processes
