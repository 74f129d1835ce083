"""Every instruction set that this processor has, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from legato.cpu.library import Library, library

# With one rounding for a product and a sum: the same results, bit for bit. Plain C may round twice.
FUSED = ["amx", "avx512-vnni", "avx-vnni", "avx2"]


@pytest.fixture(params=[*FUSED, "plain"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    found = built()
    if found.choose(request.param.encode()) is None:
        pytest.skip(f"this processor has no {request.param}")
    found.start_threads(2)
    yield found
    found.choose(None)


@pytest.fixture
def same_with_all() -> Iterator[Callable[[Callable[[], torch.Tensor]], None]]:
    """Asserts that something has the same result with every instruction set, bit for bit."""
    found = built()
    names = [name for name in FUSED if found.choose(name.encode())]
    if len(names) < 2:
        pytest.skip("this processor has one instruction set")
    found.start_threads(2)

    def compare(compute: Callable[[], torch.Tensor]) -> None:
        results = {}
        for name in names:
            found.choose(name.encode())
            results[name] = compute()
        first = results.pop(names[0])
        assert {name: torch.equal(first, result) for name, result in results.items()} == dict.fromkeys(results, True)

    yield compare
    found.choose(None)


def built() -> Library:
    found = library()
    if found is None:
        pytest.skip("the CPU kernels are not built: there is no C compiler")
    return found
