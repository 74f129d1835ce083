"""Log lines whose reader stops: nobody waits for it, and it learns that lines are missing."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from legato.common import logging as logs
from legato.common.log_stream import PATIENCE, LogStream, log_stream

LINE = "x" * 150
# More than a pipe, a socket or a terminal holds.
NUM_LINES = 5000


@dataclass
class Reader:
    """The two ends of what a log goes to."""

    reading: int
    writing: int

    def read(self) -> str:
        """All that is there."""
        os.set_blocking(self.reading, False)
        found = bytearray()
        with suppress(BlockingIOError):
            while chunk := os.read(self.reading, 1 << 20):
                found += chunk
        return found.decode().replace("\r\n", "\n")


@pytest.fixture(params=["pipe", "socket", "terminal", "pipe of another user"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    if request.param == "socket":
        pair = socket.socketpair()
        reading, writing = (each.detach() for each in pair)
    else:
        reading, writing = os.openpty() if request.param == "terminal" else os.pipe()
    if request.param == "pipe of another user":

        def refuse(*_: object) -> int:
            raise PermissionError

        monkeypatch.setattr("legato.common.log_stream.os.open", refuse)
    yield Reader(reading, writing)
    os.close(reading)
    os.close(writing)


@pytest.fixture
def handlers() -> Iterator[None]:
    before, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = before
    logging.getLogger().setLevel(level)


@pytest.mark.usefixtures("handlers")
def test_a_reader_that_stops_costs_a_moment_and_some_lines_which_are_counted(reader: Reader) -> None:
    with open(reader.writing, "w", closefd=False) as out:
        logs.setup("info", json_output=False, program="router", stream=out)
        logger = logging.getLogger("legato")
        began = time.monotonic()
        for number in range(NUM_LINES):
            logger.info("%05d %s", number, LINE)
        assert time.monotonic() - began < PATIENCE + 2, "the loop waited for its reader"
        kept = reader.read()
        logger.info("It reads again")
        rest = reader.read()
    lines = [line for line in (kept + rest).split("\n") if line]
    *first, last, told = lines
    assert all(line.endswith(LINE) for line in first), "a line is torn"
    assert last.endswith("It reads again"), last
    assert told.endswith(f"Log lines were lost: nobody read the log lines={NUM_LINES - len(first)}"), told


def test_the_mode_of_a_stream_that_others_share_stays_as_it_is(reader: Reader) -> None:
    with open(reader.writing, "w", closefd=False) as out:
        stream = log_stream(out)
        assert isinstance(stream, LogStream)
        stream.write("line\n")
    assert os.get_blocking(reader.writing)
    assert reader.read() == "line\n"


def test_a_reader_that_is_gone_is_an_error_of_every_line() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as out:
        stream = log_stream(out)
        for _ in range(2):
            with pytest.raises(BrokenPipeError):
                stream.write("line\n")


def test_a_file_needs_no_care(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as out:
        assert log_stream(out) is out


def test_what_has_no_number_needs_no_care(capsys: pytest.CaptureFixture[str]) -> None:
    assert log_stream(sys.stdout) is sys.stdout
