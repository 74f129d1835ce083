"""Every instruction set that this processor has, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from legato.cpu.library import Library, library


@pytest.fixture(params=["amx", "avx512-vnni", "avx-vnni", "avx2", "plain"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    found = library()
    if found is None:
        pytest.skip("the CPU kernels are not built: there is no C compiler")
    if found.choose(request.param.encode()) is None:
        pytest.skip(f"this processor has no {request.param}")
    found.start_threads(2)
    yield found
    found.choose(None)
