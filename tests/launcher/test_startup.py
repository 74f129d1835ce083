"""Loading and warm-up as people see them: bars on a terminal, lines anywhere else."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress

from legato.common.progress import LOADING_WEIGHTS, WARMED_UP, WARMING_UP
from legato.launcher.startup import ProgressBars, ProgressLines, StageRelay
from tests.launcher.conftest import Launched

Launch = Callable[..., Launched]


def record(message: str, program: str = "shard-0", **fields: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": message, "program": program, "fields": fields})


def loading(percent: int, program: str = "shard-0") -> logging.LogRecord:
    return record(LOADING_WEIGHTS, program, percent=percent)


def bars() -> tuple[ProgressBars, Progress]:
    progress = Progress(console=Console(file=io.StringIO()))
    return ProgressBars(progress), progress


# ---- on a terminal -------------------------------------------------------------------------------------------------


def test_a_terminal_shows_progress_bars_instead_of_lines(launch: Launch) -> None:
    launched = launch(terminal=True, FAKE_SHARD="progress", TERM="xterm")
    launched.until_logged("Listening on")
    assert "shard-0 loading weights" in launched.log
    assert re.search(r"\d+%", launched.log)
    assert "shard-0 warming up" in launched.log
    assert "percent=" not in launched.log
    assert "Warming up" not in launched.log


def test_log_lines_are_not_wrapped_above_the_progress_bars(launch: Launch) -> None:
    launched = launch(terminal=True, FAKE_SHARD="progress", TERM="xterm")
    launched.until_logged("Listening on")
    assert "shard-0: Weights loaded, " + 30 * "and then some " in launched.log
    assert "Warm-up done kv_blocks=7" in launched.log


def test_the_bars_are_gone_once_the_server_listens(launch: Launch) -> None:
    launched = launch(terminal=True, FAKE_SHARD="progress", TERM="xterm")
    launched.until_logged("Listening on")
    after = launched.log.partition("Connected")[2]
    assert "━" not in after and "warming up" not in after
    assert "\x1b[?25h" in launched.log  # the cursor is back


def test_a_shard_that_dies_while_it_loads_leaves_a_clean_terminal(launch: Launch) -> None:
    launched = launch(terminal=True, FAKE_SHARD="crash while loading", TERM="xterm")
    assert launched.wait()[0] == 1
    launched.until_logged("error: shard-0 exited with code 1: bad weights")
    assert launched.log.rindex("\x1b[?25h") < launched.log.rindex("error: shard-0")


def test_json_output_has_no_bars_even_on_a_terminal(launch: Launch) -> None:
    launched = launch("--json-output", terminal=True, FAKE_SHARD="progress", TERM="xterm")
    launched.until_logged("Listening on")
    assert "━" not in launched.log
    messages = [json.loads(line)["message"] for line in launched.log.splitlines()]
    assert messages.count(LOADING_WEIGHTS) == 5


# ---- anywhere else -------------------------------------------------------------------------------------------------


def test_a_file_gets_a_line_for_every_fifth_of_the_weights(launch: Launch) -> None:
    launched = launch(FAKE_SHARD="progress")
    launched.until_logged("Listening on")
    assert re.findall(r"Loading weights percent=(\d+)", launched.log) == ["20", "40", "60", "80", "100"]
    assert "INFO shard-0: Warming up" in launched.log


def test_a_jump_over_several_steps_is_shown() -> None:
    lines = ProgressLines()
    assert [percent for percent in (3, 37, 39, 61, 99, 100) if lines.filter(loading(percent))] == [37, 61, 99, 100]


def test_shards_have_lines_of_their_own() -> None:
    lines = ProgressLines()
    assert lines.filter(loading(20, "shard-0"))
    assert lines.filter(loading(20, "shard-1"))
    assert not lines.filter(loading(22, "shard-1"))


def test_other_records_pass() -> None:
    view, _ = bars()
    for other in (
        record("Success", percent=3),
        record(LOADING_WEIGHTS),
        record(LOADING_WEIGHTS, percent="x"),
        record("Stopped"),
    ):
        assert ProgressLines().filter(other)
        assert view.filter(other)


# ---- the bars ------------------------------------------------------------------------------------------------------


def test_every_shard_has_one_bar_that_follows_its_weights() -> None:
    view, progress = bars()
    for percent in (10, 55):
        assert not view.filter(loading(percent, "shard-0"))
    assert not view.filter(loading(30, "shard-1"))
    shown = [(task.description, task.completed) for task in progress.tasks]
    assert shown == [("shard-0 loading weights", 55), ("shard-1 loading weights", 30)]


def test_warm_up_replaces_loading_and_ends_with_a_line() -> None:
    view, progress = bars()
    view.filter(loading(100))
    assert not view.filter(record(WARMING_UP))
    assert [(task.description, task.total) for task in progress.tasks] == [("shard-0 warming up", None)]
    assert view.filter(record(WARMED_UP))
    assert progress.tasks == []


def test_a_second_warm_up_replaces_the_first() -> None:
    view, progress = bars()
    view.filter(record(WARMING_UP))
    view.filter(record(WARMING_UP))
    assert len(progress.tasks) == 1


def test_stages_are_those_of_the_slowest_shard() -> None:
    told: list[tuple[str, float]] = []
    relay = StageRelay(lambda stage, progress: told.append((stage, progress)), num_shards=2)
    for program, percent in (("shard-0", 50), ("shard-1", 10), ("shard-0", 60), ("shard-1", 70)):
        assert relay.filter(record(LOADING_WEIGHTS, program, percent=percent))
    assert relay.filter(record(WARMING_UP, "shard-0"))
    assert relay.filter(record("anything else", "shard-0"))
    assert told == [(LOADING_WEIGHTS, each) for each in (0, 0.1, 0.1, 0.6)] + [(WARMING_UP, 0)]
