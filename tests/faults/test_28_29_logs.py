"""Rows 28 and 29 of the fault table: what clients say cannot pass for a line of the log, and no secret is in one."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from legato.common.logging import parse, setup
from tests.faults.house import API_KEY, HUB_TOKEN, House
from tests.integration.processes import until

FORGED = "2026-01-31T12:00:00.000000Z ERROR router: forged"
ENDINGS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\x00\n", "\\n\n", "%0a\n"]
HOSTILE = {
    **{f"a line after {ending!r}": f"x{ending}{FORGED}" for ending in ENDINGS},
    "colours": "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "an eight-bit escape": "\x9b31m",
    "a cursor that goes back": "x\b\b\b\r\x1b[2K",
    "a broken JSON string": 'x","level":"ERROR","message":"forged"}\n{"message":"forged',
    "a closing brace": "}\n{",
    "reversed letters": "\u202edegrof\u202c",
    "half a character": "\ud800",
    "a format": "%s %d %(message)s {0.__class__}",
}
INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("legato")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def written(text: str, *, json_output: bool) -> str:
    """A record that repeats what a client said wherever a record can."""
    out = io.StringIO()
    setup("info", json_output, "router", out)
    logging.getLogger("legato.router").info("Said %s", text, extra={"fields": {"id": text, text: 1}})
    return out.getvalue()


# ---- row 28 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("json_output", [False, True], ids=["text", "json"])
def test_a_record_is_one_line_of_what_can_be_seen(name: str, json_output: bool) -> None:
    line = written(HOSTILE[name], json_output=json_output)
    assert line.endswith("\n") and not INVISIBLE.search(line[:-1])
    assert len(line.splitlines()) == 1
    line.encode()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_line_of_json_is_the_record_that_was_written(name: str) -> None:
    entry = json.loads(written(HOSTILE[name], json_output=True))
    assert entry["level"] == "INFO" and entry["message"] == f"Said {HOSTILE[name]}"
    assert entry["fields"]["id"] == HOSTILE[name]


@pytest.mark.parametrize("name", HOSTILE)
def test_the_launcher_reads_one_record_and_writes_one_line(name: str) -> None:
    record = parse(written(HOSTILE[name], json_output=True).rstrip("\n"))
    assert record is not None
    out = io.StringIO()
    setup("info", False, "launcher", out)
    logging.getLogger().handle(record)
    assert len(out.getvalue().splitlines()) == 1 and not INVISIBLE.search(out.getvalue()[:-1])


@pytest.mark.parametrize("name", HOSTILE)
def test_no_line_of_a_traceback_passes_for_a_record(name: str) -> None:
    out = io.StringIO()
    setup("info", False, "router", out)
    try:
        raise ValueError(HOSTILE[name])
    except ValueError:
        logging.getLogger("legato").exception("It failed")
    first, *others = out.getvalue().splitlines()
    assert first.endswith("It failed") and len(others) >= 3
    assert all(line.startswith("  ") and not INVISIBLE.search(line) for line in others)


def test_what_clients_say_forges_no_line_of_a_server(house: House) -> None:
    for text in HOSTILE.values():
        for body in (
            {
                "model": text,
                "user": text,
                "messages": [{"role": "user", "content": text, "name": text}],
                "max_tokens": 1,
            },
            {"model": text, "prompt": text, "user": text, "stop": text, "stream": True, "max_tokens": 1},
            {"inputs": text, "parameters": {"adapter_id": text}, text: text},
            {"messages": [{"role": text, "content": text}], "response_format": {"type": "json", "value": {text: 1}}},
        ):
            post(house, "/invocations", body)
        house.ask(b"GET /v1/models/%0a%1b[31mforged HTTP/1.1\r\nConnection: close\r\n")
        house.ask(b"GET / HTTP/1.1\r\nConnection: close\r\nX-Request-Id: \x1b[31mforged\r\n")
    log = house.program.log
    entries = [json.loads(line) for line in log.splitlines()]  # all of them are records
    assert len(entries) == log.count("\n")
    assert not [entry for entry in entries if entry["message"] == "forged" or "ERROR router" in entry["message"]]


# ---- row 29 ----------------------------------------------------------------------------------------------------------

PROMPT = "canary-prompt-91ab"
REQUESTS: list[tuple[str, Any]] = [
    ("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}),
    ("/generate", {"inputs": PROMPT, "parameters": {"temperature": -1}}),
    ("/generate", {"inputs": [PROMPT]}),
    ("/generate", {"inputs": PROMPT * 2000}),
    ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}),
    ("/generate", {"inputs": PROMPT, "parameters": {"stop": [PROMPT], "max_new_tokens": 3}}),
    ("/generate", {"inputs": PROMPT, "parameters": {"grammar": {"type": "regex", "value": f"({PROMPT}"}}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"a": PROMPT}}]}),
    ("/v1/chat/completions", {"messages": [{"content": PROMPT}], "tools": [PROMPT]}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "user": PROMPT}),
    ("/tokenize", {"inputs": PROMPT}),
    ("/chat_tokenize", {"messages": [{"role": "user", "content": PROMPT}]}),
    ("/vertex", {"instances": [{"inputs": PROMPT}]}),
    ("/nowhere", {"inputs": PROMPT}),
]


def post(house: House, path: str, body: Any, key: bool = True) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n".encode()
    return house.ask(head, data, key=key).data


def test_no_key_no_token_and_no_prompt_is_in_the_log(house: House) -> None:
    answers = [post(house, path, body, key) for path, body in REQUESTS for key in (True, False)]
    answers.append(post(house, "/generate", b'{"inputs": "' + PROMPT.encode()))
    answers.append(house.ask(b"GET /info HTTP/1.1\r\nConnection: close\r\n").data)
    assert all(answer.startswith(b"HTTP/1.1 ") for answer in answers)
    until(lambda: house.everything_said.count("Success") >= 5, "answers are logged")
    for secret in (API_KEY, HUB_TOKEN, PROMPT):
        assert house.everything_said.count(secret) == 0
    for secret in (API_KEY, HUB_TOKEN):
        assert not [answer for answer in answers if secret.encode() in answer]


def test_no_key_and_no_token_is_on_a_command_line(house: House) -> None:
    """Where every user of the machine can read it."""
    launcher = psutil.Process(house.program.process.pid)
    for process in (launcher, *launcher.children(recursive=True)):
        assert API_KEY not in " ".join(process.cmdline()) and HUB_TOKEN not in " ".join(process.cmdline())


def test_those_who_render_templates_and_check_grammars_know_no_secrets(house: House) -> None:
    post(house, "/generate", {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": "a"}}})
    names = ("chat.worker", "grammar.checker")
    children = psutil.Process(house.program.process.pid).children(recursive=True)
    workers = [child for child in children if any(name in " ".join(child.cmdline()) for name in names)]
    assert len(workers) >= 2
    for worker in workers:
        assert not {API_KEY, HUB_TOKEN} & set(worker.environ().values())
