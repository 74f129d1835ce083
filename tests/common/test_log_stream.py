"""Log lines whose reader stops: nobody waits for it, and it learns that lines are missing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from legato.common import logging as logs
from legato.common.log_stream import BACKLOG, PATIENCE, LogStream, log_stream

LINE = "x" * 150
# More than is kept for a reader.
NUM_LINES = 10_000


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


def logging_to(out: TextIO) -> LogStream:
    logs.setup("info", json_output=False, program="router", stream=out)
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, logging.StreamHandler) and isinstance(handler.stream, LogStream)
    return handler.stream


@pytest.mark.usefixtures("handlers")
def test_a_reader_that_stops_costs_a_moment_and_some_lines_which_are_counted(reader: Reader) -> None:
    with open(reader.writing, "w", closefd=False) as out:
        stream = logging_to(out)
        logger = logging.getLogger("legato")
        began = time.monotonic()
        for number in range(NUM_LINES):
            logger.info("%05d %s", number, LINE)
        assert time.monotonic() - began < PATIENCE + 3, "the loop waited for its reader"
        kept = ""
        while not stream.is_taken:
            stream.flush()
            kept += reader.read()
        logger.info("It reads again")
        kept += reader.read()
    *first, last, told = [line for line in kept.split("\n") if line]
    assert all(line.endswith(LINE) for line in first), "a line is torn"
    assert len(first) * len(LINE) > BACKLOG / 2
    assert last.endswith("It reads again"), last
    assert told.endswith(f"Log lines were lost: nobody read the log lines={NUM_LINES - len(first)}"), told


@pytest.mark.usefixtures("handlers")
def test_a_slow_reader_gets_every_line_of_a_burst_and_the_event_loop_never_waits(reader: Reader) -> None:
    """Hundreds of requests may end in one step. Nothing is logged after them that would push the lines on."""
    num_lines = BACKLOG // (2 * len(LINE))

    async def main() -> str:
        began = time.monotonic()
        for number in range(num_lines):
            logging.getLogger("legato").info("%05d %s", number, LINE)
        assert time.monotonic() - began < 3
        kept = ""
        while kept.count("\n") < num_lines:
            await asyncio.sleep(0.005)
            kept += reader.read()
        return kept

    with open(reader.writing, "w", closefd=False) as out:
        logging_to(out)
        lines = asyncio.run(asyncio.wait_for(main(), 60)).split("\n")
    assert [line[-len(LINE) - 6 : -len(LINE) - 1] for line in lines if line] == [f"{n:05d}" for n in range(num_lines)]


def test_lines_of_several_processes_on_one_pipe_stay_whole() -> None:
    async def main() -> str:
        for number in range(1000):
            for stream in streams:
                stream.write(f"{number:05d} {LINE}\n" * (1 + number % 3))
                stream.flush()
        kept = ""
        while not all(stream.is_taken for stream in streams):
            await asyncio.sleep(0.005)
            kept += reader.read()
        return kept + reader.read()

    reader = Reader(*os.pipe())
    with open(reader.writing, "w") as out:
        streams = [stream for stream in (log_stream(out) for _ in range(3)) if isinstance(stream, LogStream)]
        lines = asyncio.run(asyncio.wait_for(main(), 60)).splitlines()
    os.close(reader.reading)
    assert {len(line) for line in lines} == {len(LINE) + 6}
    assert len(lines) == 3 * sum(1 + number % 3 for number in range(1000))


def test_the_mode_of_a_stream_that_others_share_stays_as_it_is(reader: Reader) -> None:
    with open(reader.writing, "w", closefd=False) as out:
        stream = log_stream(out)
        assert isinstance(stream, LogStream)
        stream.write("line\n")
        stream.flush()
    assert os.get_blocking(reader.writing)
    assert reader.read() == "line\n"


def test_a_reader_that_is_gone_is_an_error_of_every_line() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as out:
        stream = log_stream(out)
        for _ in range(2):
            stream.write("line\n")
            with pytest.raises(BrokenPipeError):
                stream.flush()


def test_a_file_needs_no_care(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as out:
        assert log_stream(out) is out


def test_what_has_no_number_needs_no_care(capsys: pytest.CaptureFixture[str]) -> None:
    assert log_stream(sys.stdout) is sys.stdout
