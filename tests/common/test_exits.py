"""What is said about the end of a process, and streams that a process was started without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from legato.common.exits import report, signal_name


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40")])
def test_every_signal_has_a_name(number: int, name: str) -> None:
    assert signal_name(number) == name


def test_a_report_that_nobody_reads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        report("one", "two")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


@pytest.mark.parametrize("code", [0, 4])
def test_an_exit_has_its_code_although_nobody_reads_what_was_written(code: int) -> None:
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    program = f"print('x'); from legato.common.exits import exit_now; exit_now('reason', {code})"
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=writing, stderr=writing, env=buffered)
    os.close(writing)
    assert process.wait(60) == code


def test_streams_that_are_closed_lead_to_nowhere_and_nothing_else_gets_their_numbers() -> None:
    program = (
        "import os, socket, sys; from legato.common.exits import open_standard_streams as opened; opened();"
        " print('out'); print('err', file=sys.stderr); assert sys.stdin.read() == '';"
        " sys.exit(socket.socket().fileno())"
    )
    command = f'exec "{sys.executable}" -c "{program}" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], timeout=60).returncode > 2
