"""Rows 21 and 22 of the fault table: templates and messages that want out, or too much, or to be somebody else."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from legato.chat.template import ChatTemplate, MissingTemplateVariable, TemplateError
from tests.chat.cases import make, user
from tests.faults.injections import CANARY, ESCAPES, SIGNS, TYPED
from tests.http.asgi import FakeBackend
from tests.http.routes.openai.fakes import CHAT, HI, FakeTemplate, Server
from tests.stopwatch import Stopwatch

MEGABYTE = 1 << 20
FRIENDLY = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ note }}{{ documents }}"
)


@pytest.fixture(scope="module")
def friendly() -> Iterator[ChatTemplate]:
    template = make(FRIENDLY)
    yield template
    template.close()


# ---- row 21: too much ------------------------------------------------------------------------------------------------

GREEDY = {
    "a loop of a billion": "{% for i in range(10 ** 9) %}{% endfor %}",
    "loops in loops": "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a gigabyte at once": "{{ 'x' * 10 ** 9 }}",
    "a gigabyte in pieces": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "a gigabyte that nobody sees": "{% set x = 'x' * 10 ** 9 %}",
    "a number of a billion digits": "{{ 10 ** (messages | length * 10 ** 9) }}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("source", GREEDY.values(), ids=GREEDY)
def test_a_template_that_wants_too_much_is_stopped_within_a_second_and_16_megabytes(source: str) -> None:
    template = make("{% if messages[0].content == 'x' %}" + source + "{% endif %}fine")
    process = psutil.Process()
    rss, stopwatch = process.memory_info().rss, Stopwatch()
    with pytest.raises(TemplateError) as refusal:
        template.render([user("x")])
    seconds = stopwatch.seconds
    assert refusal.value.status == 422
    assert process.memory_info().rss - rss < 16 * MEGABYTE
    assert template.render([user("hi")]) == "fine"
    template.close()
    assert seconds <= 1.0


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10 ** (10 ** 8) }}",
        "{{ 10 ** (messages | length * 10 ** 6) }}",
        "{% set n = namespace(x=3) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 'x' * 10 ** 7 }}",
        "{{ 10 ** 7 * 'x' }}",
        "{{ [1] * 10 ** 7 }}",
        "{{ (1, 2) * (messages | length * 10 ** 7) }}",
    ],
)
def test_an_operator_that_makes_much_of_little_is_refused_before_it_computes(source: str) -> None:
    """Not by the limits of the process, which would take a second of processor time and end it."""
    template = make("{% if messages[0].content == 'x' %}" + source + "{% endif %}fine")
    with pytest.raises(TemplateError, match=r"the result of \*+ has more than"):
        template.render([user("x")])
    template.close()


def test_ordinary_arithmetic_is_as_it_was() -> None:
    template = make("{{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2.5 * 2 }} {{ '-' * 3 }} {{ 3 * 'ab' }} {{ ([0] * 2) | length }}")
    assert template.render([user("x")]) == "1024 0.5 5.0 --- ababab 2"
    template.close()


# ---- row 21: out -----------------------------------------------------------------------------------------------------


def outcome(template: ChatTemplate, messages: list[Any], **how: Any) -> str:
    try:
        return template.render(messages, **how)
    except (TemplateError, MissingTemplateVariable) as refusal:
        return str(refusal)


@pytest.mark.parametrize("source", ESCAPES)
def test_no_template_gets_out_of_its_sandbox(source: str) -> None:
    """Refused, or empty, or just text. A process of its own is behind that, with nothing in it that anybody wants."""
    template = make(source)
    messages = [user("hi")]
    said = outcome(template, messages)
    template.close()
    assert not [sign for sign in SIGNS if sign in said], said
    assert messages == [user("hi")]


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    assert len(set(ESCAPES)) >= 60 and len(set(TYPED)) >= 20


def test_a_message_is_never_rendered(friendly: ChatTemplate) -> None:
    """Whatever is typed comes out as it was typed, wherever it was typed."""
    for text in [*TYPED, *ESCAPES]:
        said = friendly.render([{"role": text, "content": text}], kwargs={"note": text}, documents=[{"text": text}])
        assert said.startswith(f"<|{text}|>{text}")
        assert CANARY not in said


def test_a_tool_or_a_name_is_never_rendered(friendly: ChatTemplate) -> None:
    for text in [*TYPED, *ESCAPES]:
        tool = {"type": "function", "function": {"name": text, "description": text, "parameters": {"title": text}}}
        assert CANARY not in friendly.render([user("hi")], tools=[tool])


def test_a_template_process_has_none_of_our_secrets_and_can_open_nothing(
    friendly: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    template = make("{{ messages[0].content }}")
    worker = max(psutil.Process().children(), key=lambda process: process.create_time())
    assert "HF_TOKEN" not in worker.environ()
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        assert resource.prlimit(worker.pid, kind) == (0, 0)
    assert not [file for file in worker.open_files() if Path(file.path).is_relative_to(os.getcwd())]
    template.close()


# ---- row 22 ----------------------------------------------------------------------------------------------------------

INTERNAL = [
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "joiner", "lipsum",
]  # fmt: skip


@pytest.mark.parametrize("name", INTERNAL)
def test_variables_for_the_template_replace_nothing_of_ours(friendly: ChatTemplate, name: str) -> None:
    with pytest.raises(TemplateError, match=f"cannot set `{name}`"):
        friendly.render([user("hi")], kwargs={name: "mine"})


@pytest.mark.parametrize("name", ["self", "loop", "caller", "__class__", "__globals__", "environment", "bos_token"])
def test_other_names_that_mean_something_do_no_harm(friendly: ChatTemplate, name: str) -> None:
    assert "<|user|>hi" in friendly.render([user("hi")], kwargs={name: "mine"})


def test_a_template_in_the_request_is_not_looked_at() -> None:
    server = Server(FakeBackend(), FakeTemplate())
    assert server.ask(CHAT, {"messages": HI, "chat_template": "{{ 1 / 0 }}"}).status == 200
    assert server.template is not None and "chat_template" not in server.template.asked[0]


def test_a_template_among_the_variables_is_refused() -> None:
    template = make(FRIENDLY)
    server = Server(FakeBackend(), template)  # type: ignore[arg-type]  # a real one
    answer = server.ask(CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}})
    template.close()
    assert (answer.status, answer.json()["error_type"]) == (422, "template_error")
