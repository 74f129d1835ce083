"""Logging to stdout, as text or as one JSON object per line.

    logger.info("Warmed up", extra={"fields": {"kv_blocks": 512}})

    2026-01-31T12:00:00.000000Z  INFO router: Warmed up kv_blocks=512
    {"timestamp": "2026-01-31T12:00:00.000000Z", "level": "INFO", "message": "Warmed up", ...}

A record about one request has a `span`, and the form of TGI's log lines, which people parse:

    2026-01-31T12:00:00.000000Z  INFO generate{total_time="1.2s"}: text_generation_router::server: FILE:LINE: Success

Shards and router write JSON, which the launcher parses and writes in the requested format.

Log lines may contain text from clients. It cannot forge a line or control a terminal: line ends and control characters
are escaped. Only tracebacks span several lines, which are indented.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from legato.common.errors import OptionError
from legato.common.log_stream import LogStream, log_stream

TRACE = 5
LEVELS = {
    "off": logging.CRITICAL + 10,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": TRACE,
}
NAMES = {logging.ERROR: "ERROR", logging.WARNING: "WARN", logging.INFO: "INFO", logging.DEBUG: "DEBUG", TRACE: "TRACE"}
# Log level of other libraries for each of ours: one less verbose.
FOREIGN = {logging.INFO: logging.WARNING, logging.DEBUG: logging.INFO, TRACE: logging.DEBUG}
COLOURS = {"ERROR": "\033[31m", "WARN": "\033[33m", "INFO": "\033[32m", "DEBUG": "\033[34m", "TRACE": "\033[35m"}

# Part of a span's name that Rust writes without quotes, because it is no string there.
_UNQUOTED = "parameters"
LINES_LOST = "Log lines were lost: nobody read the log"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep

_encoder = msgspec.json.Encoder(enc_hook=str)

# Line ends, control characters, bidirectional controls and surrogates.
_CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def setup(level: str, json_output: bool, program: str, stream: TextIO | None = None) -> None:
    """Log everything in this process to `stream` (default: stdout) under the name `program`."""
    level_number, modules = _parse_levels(level, program)
    out = stream or sys.stdout
    handler = _Handler(log_stream(out))  # type: ignore[arg-type]  # has what is needed of a TextIO
    # TGI's variable. Lines that go to a file never have colours.
    colour = out.isatty() and os.environ.get("LOG_COLORIZE", "1").lower() not in ("0", "false")
    handler.setFormatter(JsonFormatter(program) if json_output else TextFormatter(program, colour=colour))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(FOREIGN.get(level_number, level_number))
    logging.getLogger("legato").setLevel(modules.pop("legato", level_number))
    for name, module_level in modules.items():
        logging.getLogger(name).setLevel(module_level)


def parse(line: str) -> logging.LogRecord | None:
    """The record of a line written by `JsonFormatter`, or None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
        return logging.makeLogRecord(
            {
                "created": datetime.fromisoformat(entry["timestamp"]).timestamp(),
                "levelno": LEVELS[entry["level"].lower()],
                "name": entry["target"],
                "msg": entry["message"],
                "program": entry["program"],
                "pathname": entry.get("filename", ""),
                "lineno": entry.get("line_number", 0),
                "span": entry.get("span"),
                "fields": entry.get("fields", {}),
                "exc_text": entry.get("exception"),
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class _Handler(logging.StreamHandler[TextIO]):
    """Ignores a closed stream and a full disk, because there is nowhere to report them. Lines that were lost because
    nobody read them are counted in the next one."""

    def emit(self, record: logging.LogRecord) -> None:
        stream: object = self.stream
        super().emit(record)
        if isinstance(stream, LogStream) and stream.num_lost and stream.is_taken:
            fields, stream.num_lost = {"lines": stream.num_lost}, 0
            entry = {"levelno": logging.WARNING, "msg": LINES_LOST, "name": __name__, "fields": fields}
            super().emit(logging.makeLogRecord(entry))

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with TGI's keys. Floats are rounded to six decimals: seconds to microseconds."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "timestamp": _format_time(record.created),
            "level": level_name(record),
            "message": record.getMessage(),
            "target": _target(record),
            "filename": _source_file(record),
            "line_number": record.lineno,
            "program": getattr(record, "program", self.program),
        }
        if span := getattr(record, "span", None):
            entry |= {"span": span, "spans": [span]}
        if fields := self._fields(record):
            entry["fields"] = fields
        if exception := self._exception(record):
            entry["exception"] = exception
        return _escaped(_json(entry))

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields: dict[str, Any] = getattr(record, "fields", None) or {}
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}

    def _exception(self, record: logging.LogRecord) -> str | None:
        return self.formatException(record.exc_info) if record.exc_info else record.exc_text


class TextFormatter(JsonFormatter):
    """Time, level, program, message and fields, followed by the traceback if there is one.

    A record with a span has the span, its target and its place in the source instead of the program, as in TGI.
    """

    def __init__(self, program: str, colour: bool) -> None:
        super().__init__(program)
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level, program = level_name(record), getattr(record, "program", self.program)
        moment, label = _format_time(record.created), f"{level:>5}"
        if self.colour:
            moment, label = f"\033[2m{moment}\033[0m", f"{COLOURS[level]}{label}\033[0m"
        span: dict[str, object] | None = getattr(record, "span", None)
        if span:
            program = f"{_span_text(span)}: {_target(record)}: {_source_file(record)}:{record.lineno}"
        words = [f"{moment} {label} {_escaped(program)}: {_escaped(record.getMessage())}"]
        words += [f"{_escaped(name)}={_quoted(value)}" for name, value in self._fields(record).items()]
        line = " ".join(words)
        exception = self._exception(record)
        return f"{line}\n{_indented(exception)}" if exception else line


def level_name(record: logging.LogRecord) -> str:
    """The highest of our five levels that does not exceed the record's level."""
    return next((name for number, name in NAMES.items() if record.levelno >= number), "TRACE")


def _parse_levels(text: str, program: str) -> tuple[int, dict[str, int]]:
    """`info,legato.router=debug` as (level, level by module). Names may be TGI's: `text_generation_router::infer=debug`
    is all of Legato in the router, and nothing in other programs."""
    level, modules = logging.INFO, {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        module, _, name = part.rpartition("=")
        if name.lower() not in LEVELS:
            known = ", ".join(name for name in LEVELS if name != "warning")
            raise OptionError(f"--logger-level (LOG_LEVEL): {name!r} is not a log level; expected one of {known}")
        first = module.partition("::")[0]
        if first.startswith("text_generation_"):
            if first.replace("_", "-").endswith(program):
                modules["legato"] = LEVELS[name.lower()]
        elif module:
            modules[module.replace("::", ".")] = LEVELS[name.lower()]
        else:
            level = LEVELS[name.lower()]
    return level, modules


def _target(record: logging.LogRecord) -> str:
    """What TGI calls the module, where programs look for it; otherwise the logger's name."""
    target: str = getattr(record, "target", record.name)
    return target


def _source_file(record: logging.LogRecord) -> str:
    """Relative to the folder of the package: `legato/http/inference.py`."""
    return record.pathname.removeprefix(_PACKAGE)


def _span_text(span: dict[str, object]) -> str:
    """`generate{parameters=GenerateParameters { ... } total_time="1.2s"}`"""
    fields = {name: str(value) for name, value in span.items() if name != "name"}
    words = [
        f"{name}={value if name == _UNQUOTED else json.dumps(value, ensure_ascii=False)}"
        for name, value in fields.items()
    ]
    return f"{span['name']}{{{' '.join(words)}}}"


def _quoted(value: object) -> str:
    text = str(value)
    quoted = not text or any(character.isspace() or character == '"' for character in text)
    return _escaped(json.dumps(text, ensure_ascii=False) if quoted else text)


def _json(entry: dict[str, Any]) -> str:
    try:
        return _encoder.encode(entry).decode()
    except UnicodeEncodeError:  # half a character, of which JSON has an escape
        return json.dumps(entry, default=str, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Control characters as JSON escapes, so that JSON stays valid."""
    return _CONTROL_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _indented(exception: str) -> str:
    """Indented, so that no line of it can be mistaken for a record."""
    return "\n".join(f"  {_escaped(line)}" for line in exception.split("\n"))


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
