"""What the router says of the limits that warm-up found."""

from __future__ import annotations

from typing import Any

import pytest

from legato.common.options import RouterOptions
from legato.pb import generate_pb2 as pb
from legato.router.cli import reduction_warnings

FOUND = pb.WarmupResponse(max_input_tokens=8191, max_total_tokens=8192)


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ({}, []),
        ({"max_total_tokens": 8192, "max_input_tokens": 8191}, []),
        ({"max_total_tokens": 100_000}, ["--max-total-tokens 100000"]),
        ({"max_input_tokens": 8192}, ["--max-input-tokens 8192"]),
        (
            {"max_total_tokens": 100_000, "max_input_tokens": 90_000},
            ["--max-total-tokens 100000", "--max-input-tokens 90000"],
        ),
    ],
)
def test_a_limit_that_is_not_met_is_a_warning_with_the_limit_that_counts(
    asked: dict[str, Any], flags: list[str]
) -> None:
    warnings = list(reduction_warnings(RouterOptions(**asked), FOUND))
    assert [warning.partition(" exceeds")[0].partition(" leaves")[0] for warning in warnings] == flags
    assert all("8192" in warning for warning in warnings)
