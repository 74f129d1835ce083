"""One server for the whole folder, with secrets to keep and a log that says everything."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.faults.house import House, open_house


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("house")) as house:
        yield house


@pytest.fixture
def small_heap() -> Iterator[None]:
    """For those who look at the clock: a test run holds far more objects than a router, and looking through all of
    them for garbage takes a while."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
