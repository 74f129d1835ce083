from __future__ import annotations

import pytest

from legato.telemetry.tracing import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [(f"00-{TRACE}-{SPAN}-01", True), (f"00-{TRACE}-{SPAN}-00", False), (f"01-{TRACE}-{SPAN}-03-more", True)],
)
def test_a_header_names_a_trace_and_a_span(header: str, sampled: bool) -> None:
    assert TraceContext.parse(header) == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE}\n-{SPAN}-01",
    ],
)
def test_other_headers_are_ignored(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_a_child_is_in_the_same_trace_and_reads_back() -> None:
    parent = TraceContext.root()
    child = parent.child()
    assert child.trace_id == parent.trace_id and child.span_id != parent.span_id
    assert TraceContext.parse(child.header) == child
