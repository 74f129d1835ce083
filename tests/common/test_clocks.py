"""A clock that is set, or jumps by an hour, ends no request and kills no process: only monotonic clocks decide."""

from __future__ import annotations

import ast
from pathlib import Path

import legato

# What reads the time of day, and why it may: people or other programs read it, nothing is decided by it.
ALLOWED = {
    "balancer/calls.py": "`created`",
    "benchmark/report.py": "date of a report",
    "chat/environment.py": "strftime_now of chat templates",
    "common/identity.py": "`created`",
    "http/routes/openai/models.py": "`created`",
    "http/routes/responses/job.py": "`created_at`",
    "router/monitoring/dashboard.py": "time on the page",
    "router/monitoring/kv_events.py": "time of vLLM's events",
    "router/monitoring/tracing.py": "spans",
    "server/tracing.py": "spans",
    "telemetry/metrics.py": "a metric whose value is the time",
    "telemetry/tracing.py": "spans",
}
WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


def reads_wall_clock(file: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and (node.value.id if isinstance(node.value, ast.Name) else node.value.attr, node.attr) in WALL_CLOCKS
        for node in ast.walk(ast.parse(file.read_text()))
    )


def test_only_what_people_read_has_the_time_of_day() -> None:
    package = Path(legato.__file__).parent
    found = {str(file.relative_to(package)) for file in package.rglob("*.py") if reads_wall_clock(file)}
    assert found == set(ALLOWED)
