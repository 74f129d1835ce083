"""One server for the whole folder, with secrets to keep and a log that says everything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.house import House, open_house


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("house")) as house:
        yield house
