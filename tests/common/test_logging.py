"""Log lines as text and as JSON, and back."""

from __future__ import annotations

import errno
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from legato.common.errors import OptionError
from legato.common.logging import TRACE, parse, setup


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """Whatever a test sets up ends with it."""
    root, ours = logging.getLogger(), logging.getLogger("legato")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.getLogger("legato.router").setLevel(logging.NOTSET)


def logged(level: str = "info", json_output: bool = False, stream: io.StringIO | None = None) -> io.StringIO:
    out = stream or io.StringIO()
    setup(level, json_output, "router", out)
    return out


def test_text_has_time_level_program_message_and_fields() -> None:
    out = logged()
    logging.getLogger("legato.router").warning("Slow %s", "step", extra={"fields": {"ms": 12, "why": "a prompt"}})
    moment, line = out.getvalue().split(" ", 1)
    assert moment.endswith("Z") and len(moment) == len("2026-01-31T12:00:00.000000Z")
    assert line == ' WARN router: Slow step ms=12 why="a prompt"\n'


def test_json_is_one_object_per_line() -> None:
    out = logged(json_output=True)
    logging.getLogger("legato.http.app").info("two\nlines", extra={"fields": {"total_time": "1.2s"}})
    (line,) = out.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("timestamp").endswith("Z")
    assert entry.pop("line_number") > 1
    assert entry == {
        "level": "INFO",
        "message": "two\nlines",
        "target": "legato.http.app",
        "filename": "tests/common/test_logging.py",
        "program": "router",
        "fields": {"total_time": "1.2s"},
    }


@pytest.mark.parametrize("json_output", [False, True])
def test_floats_are_rounded_to_six_decimals(json_output: bool) -> None:
    out = logged(json_output=json_output)
    logging.getLogger("legato").info("Success", extra={"fields": {"total_time": 0.1234567891234567, "tokens": 3}})
    if json_output:
        assert json.loads(out.getvalue())["fields"] == {"total_time": 0.123457, "tokens": 3}
    else:
        assert "total_time=0.123457 tokens=3" in out.getvalue()


@pytest.mark.parametrize("json_output", [False, True])
def test_a_traceback_is_kept(json_output: bool) -> None:
    out = logged(json_output=json_output)
    try:
        raise ValueError("bad weights")
    except ValueError:
        logging.getLogger("legato").exception("Cannot load")
    assert "Traceback" in out.getvalue()
    assert "ValueError: bad weights" in out.getvalue()


def test_colours_appear_only_on_a_terminal() -> None:
    plain, coloured = logged(), None
    logging.getLogger("legato").error("x")
    coloured = logged(stream=Terminal())
    logging.getLogger("legato").error("x")
    assert "\033" not in plain.getvalue()
    assert "\033[31m" in coloured.getvalue()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("error", ["ERROR"]),
        ("warn", ["ERROR", "WARN"]),
        ("INFO", ["ERROR", "WARN", "INFO"]),
        ("debug", ["ERROR", "WARN", "INFO", "DEBUG"]),
        ("trace", ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"]),
        ("off", []),
    ],
)
def test_a_level_includes_more_severe_ones(level: str, expected: list[str]) -> None:
    out = logged(level)
    for number in (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG, TRACE):
        logging.getLogger("legato.x").log(number, "x")
    assert [line.split()[1] for line in out.getvalue().splitlines()] == expected


def test_other_libraries_log_one_level_less() -> None:
    out = logged("info")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("trouble")
    assert "chatter" not in out.getvalue()
    assert "trouble" in out.getvalue()


def test_modules_can_have_their_own_level() -> None:
    out = logged("warn,legato.router=debug,text_generation_launcher::main=trace")
    logging.getLogger("legato.router").debug("shown")
    logging.getLogger("legato.server").info("hidden")
    assert out.getvalue().endswith("shown\n")
    assert "hidden" not in out.getvalue()


@pytest.mark.parametrize(
    ("level", "program", "expected"),
    [
        ("info,text_generation_router=debug", "text-generation-router", logging.DEBUG),
        ("info,text_generation_router=debug", "launcher", logging.INFO),
        ("text_generation_launcher=warn,text_generation_router::infer=trace", "text-generation-router", TRACE),
        ("text_generation_launcher=warn,text_generation_router::infer=trace", "launcher", logging.WARNING),
        ("error,text_generation_router=info", "text-generation-server", logging.ERROR),
    ],
)
def test_names_of_tgis_programs_set_the_level_of_that_program(level: str, program: str, expected: int) -> None:
    setup(level, False, program, io.StringIO())
    assert logging.getLogger("legato").level == expected
    assert logging.getLogger("text_generation_router").level == logging.NOTSET


SPAN = {"name": "generate", "parameters": "GenerateParameters { best_of: None }", "total_time": "1.2s", "seed": "None"}


def test_a_record_with_a_span_has_the_form_of_tgis_lines() -> None:
    out = logged()
    logging.getLogger("legato.router").info("Success", extra={"span": SPAN, "target": "text_generation_router::server"})
    line = re.sub(r"py:\d+", "py:N", out.getvalue().split(" ", 1)[1])
    assert line == (
        ' INFO generate{parameters=GenerateParameters { best_of: None } total_time="1.2s" seed="None"}: '
        "text_generation_router::server: tests/common/test_logging.py:N: Success\n"
    )


def test_json_has_the_span_twice_as_in_tgi_and_the_launcher_writes_the_same_text() -> None:
    out = logged(json_output=True)
    logging.getLogger("legato.router").info("Success", extra={"span": SPAN, "target": "text_generation_router::server"})
    entry = json.loads(out.getvalue())
    assert entry["target"] == "text_generation_router::server"
    assert entry["span"] == SPAN and entry["spans"] == [SPAN]
    record = parse(out.getvalue().rstrip())
    assert record is not None
    text = logged()
    logging.getLogger().handle(record)
    assert (
        f"}}: text_generation_router::server: tests/common/test_logging.py:{entry['line_number']}: " in text.getvalue()
    )


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"LOG_LEVEL.*'loud'.*error, warn, info, debug, trace"):
        setup("loud", False, "router", io.StringIO())


def test_a_json_line_reads_back_as_the_same_record() -> None:
    out = logged(json_output=True)
    try:
        raise ValueError("bad weights")
    except ValueError:
        logging.getLogger("legato.server").warning("100 %", exc_info=True, extra={"fields": {"rank": 0}})
    first = out.getvalue()
    record = parse(first.rstrip())
    assert record is not None
    again = logged(json_output=True)
    logging.getLogger().handle(record)
    assert again.getvalue() == first


@pytest.mark.parametrize("line", ["", "plain", "{", "{}", '{"message": 1}', "[1]", '{"timestamp": 1, "level": 2}'])
def test_other_lines_are_not_parsed_as_records(line: str) -> None:
    assert parse(line) is None


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_closed_stream_and_a_full_disk_are_ignored(capsys: pytest.CaptureFixture[str], error: OSError) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    logged(stream=Broken())
    logging.getLogger("legato").error("x")
    assert capsys.readouterr().err == ""
