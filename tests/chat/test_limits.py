"""Hostile templates and messages: a typed error, soon, and a router that notices nothing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from legato.chat.rendering import Conversation, Renderer
from legato.chat.sources import ChatTemplates
from legato.chat.template import ChatTemplate, MissingTemplateVariable, RenderLimits, TemplateError
from tests.chat.cases import assistant, make, user
from tests.integration.processes import has_ended
from tests.stopwatch import Stopwatch

MEGABYTE = 1 << 20


def limited(template: str, **limits: Any) -> ChatTemplate:
    return ChatTemplate(ChatTemplates("test", {"default": template}, {}), RenderLimits(**limits))


def refusal(template: str, message: str = "Hi") -> str:
    chat = make(template)
    try:
        with pytest.raises((TemplateError, MissingTemplateVariable)) as raised:
            chat.render([user(message)])
    finally:
        chat.close()
    return str(raised.value)


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture
def echo() -> Iterator[ChatTemplate]:
    template = make("{% for m in messages %}{{ m.content }}{% endfor %}")
    yield template
    template.close()


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    # Strings of a megabyte that differ in their last letter, compared a million times.
    "a single operation": "{% set x = 'y' * 999999 %}{{ x ~ 'z' in [x ~ 'y'] * 999999 }}",
    "operations while it is compiled": "{{ '' | center(999999) | list" + " | sort" * 20 + " }}",
    "a chain of filters": "{% set x = range(99999) | list %}" + "{% set x = x | sort(reverse=true) | list %}" * 5000,
}

GREEDY = {
    "a long string": "{{ 'a' * 10 ** 10 }}",
    "a long list": "{{ [messages] * 10 ** 9 }}",
    "padding": "{{ messages[0].content.ljust(10 ** 9) }}",
    "indentation": "{{ messages[0].content | indent(10 ** 9, true) }}",
    "a format": "{{ '%0999999999d' | format(1) }}",
    "a format method": "{{ '{:999999999}'.format(1) }}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "batches": "{{ messages | batch(10 ** 9, 'x') | list }}",
}

LONG = {
    "range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'abcdefgh' * 999 }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "parentheses": "{{ " + "(" * 9999 + ")" * 9999 + " }}",
    "nested blocks": "{% if true %}" * 999 + "{% endif %}" * 999,
}


class TestTime:
    @pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
    def test_an_endless_template_is_stopped_in_time(self, template: str) -> None:
        chat = limited(template, seconds=0.2)
        before = cpu_seconds_of_children()
        with pytest.raises(TemplateError, match=r"takes more than 0\.2 s"):
            chat.render([user()])
        assert cpu_seconds_of_children() - before < 0.5
        chat.close()

    def test_nobody_gets_more_than_a_second(self) -> None:
        chat = make("{% if messages[0].content == 'x' %}" + ENDLESS["loops"] + "{% endif %}")
        before = cpu_seconds_of_children()
        with pytest.raises(TemplateError, match=r"takes more than 0\.8 s"):
            chat.render([user("x")])
        assert cpu_seconds_of_children() - before < 1.0
        chat.close()

    def test_messages_can_stop_the_process_once_and_nobody_else(self) -> None:
        slow_for_some = "{% if messages[0].content == 'x' %}" + ENDLESS["loops"] + "{% endif %}fine"
        chat = limited(slow_for_some, seconds=0.1)
        assert chat.render([user()]) == "fine"
        for _ in range(2):
            with pytest.raises(TemplateError, match=r"takes more than 0\.1 s"):
                chat.render([user("x")])
            assert chat.render([user()]) == "fine"
        chat.close()


class TestMemory:
    @pytest.mark.parametrize("template", GREEDY.values(), ids=GREEDY)
    def test_a_greedy_template_is_stopped(self, template: str) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = refusal(template)
        assert "too much memory" in said or "takes more than" in said or "characters" in said
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 16 * MEGABYTE

    def test_its_process_goes_on(self) -> None:
        chat = limited("{% if messages[0].content == 'x' %}" + GREEDY["padding"] + "{% endif %}fine")
        with pytest.raises(TemplateError, match="too much memory"):
            chat.render([user("x")])
        assert chat.render([user()]) == "fine"
        chat.close()


class TestSize:
    @pytest.mark.parametrize("template", LONG.values(), ids=LONG)
    def test_too_much_of_anything_is_refused_at_once(self, template: str) -> None:
        stopwatch = Stopwatch()
        assert refusal(template).startswith("Template error: ")
        assert stopwatch.seconds < 2

    def test_the_longest_prompt_is_exact(self) -> None:
        chat = limited("{{ messages[0].content }}", output=1000)
        assert len(chat.render([user("é" * 1000)])) == 1000
        with pytest.raises(TemplateError, match="more than 1000 characters"):
            chat.render([user("é" * 1001)])
        chat.close()

    def test_a_payload_of_the_largest_size_is_rendered(self, echo: ChatTemplate) -> None:
        text = "wörd " * 400_000
        assert echo.render([user(text)]) == text
        assert echo.render([user("x")] * 20_000) == "x" * 20_000

    def test_a_sentence_about_an_error_has_an_end(self) -> None:
        assert len(refusal("{{ raise_exception('x' * 999999) }}")) < 2000

    def test_messages_nested_too_deeply_are_refused(self, echo: ChatTemplate) -> None:
        deep: Any = []
        for _ in range(5000):
            deep = [deep]
        with pytest.raises(TemplateError, match="too deeply"):
            echo.render([assistant("", tool_calls=deep)])

    def test_odd_text_comes_through(self, echo: ChatTemplate) -> None:
        for text in ("\ud800", "\x00", "\u2028\r\n", "😀" * 1000, "LEGATO_CONTINUES_HERE "):
            assert echo.render([user(text)]) == text


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ lipsum['__glo' + 'bals__'].os }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ raise_exception.__code__.co_consts }}",
    "{{ messages | attr('__class__') | attr('__base__') }}",
    "{{ (messages | attr('append'))(1) }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ ('{0.__class__}' | attr('format'))(messages) }}",
    "{{ (['{0.__class__}'] | map('attr', 'format') | first)(messages) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ dict.__class__ }}",
    "{{ dict.__call__.__func__.__globals__ }}",
    "{{ dict['fromkeys'].__func__.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ messages.__reduce_ex__(2) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].pop('role') }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ url_for.__globals__ }}",
    "{{ config.items() }}",
    "{{ request.application.__globals__ }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__name__ }}",
    "{{ messages | groupby('__class__') }}",
    "{{ messages | sum(attribute='__class__') }}",
    "{% call raise_exception.__class__() %}{% endcall %}",
    "{{ caller.__globals__ }}",
    "{% macro m() %}{{ m.__call__.__globals__ }}{% endmacro %}{{ m() }}",
    "{{ ((x for x in ()) | attr('gi_frame')).f_globals }}",
]


class TestEscapes:
    @pytest.mark.parametrize("template", ESCAPES)
    def test_a_template_cannot_reach_python(self, template: str) -> None:
        try:
            text = Renderer({"default": template}, {}, output_limit=MEGABYTE).render(Conversation([user()]))
        except Exception:
            text = ""
        # What is not refused comes to nothing: an undefined value prints as nothing.
        assert not any(word in text for word in ("class", "built", "function", "object", "uid=", "root"))

    def test_the_process_has_none_of_our_secrets(self, echo: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        chat = make("x")
        environment = Path(f"/proc/{children()[-1]}/environ").read_bytes()
        chat.close()
        assert b"PYTHONPATH" in environment and b"hf_secret" not in environment

    def test_the_process_can_open_nothing(self, echo: ChatTemplate) -> None:
        limits = Path(f"/proc/{children()[-1]}/limits").read_text().splitlines()
        closed = [line.split("  ")[0] for line in limits if line.split()[-3:-1] == ["0", "0"]]
        assert {"Max open files", "Max processes", "Max file size"} <= set(closed)


class TestProcesses:
    def test_a_process_that_is_killed_is_replaced(self, echo: ChatTemplate) -> None:
        (worker,) = echo._processes.idle
        worker.process.kill()
        worker.process.wait()
        assert echo.render([user("again")]) == "again"

    def test_a_process_that_is_killed_while_it_renders_is_an_error(self) -> None:
        chat = limited("{% if messages[0].content == 'x' %}" + ENDLESS["loops"] + "{% endif %}fine", seconds=20)
        killer = threading.Timer(0.2, os.kill, [children()[-1], signal.SIGKILL])
        killer.start()
        with pytest.raises(TemplateError, match="crashed the process"):
            chat.render([user("x")])
        assert chat.render([user()]) == "fine"
        chat.close()

    def test_none_is_left_after_closing(self) -> None:
        before = children()
        chat = make("x")
        assert len(children()) == len(before) + 1
        chat.close()
        assert children() == before

    def test_none_outlives_its_router(self) -> None:
        program = (
            "from legato.chat.template import ChatTemplate, ChatTemplates; "
            "chat = ChatTemplate(ChatTemplates('test', {'default': 'x'}, {})); print('ready', flush=True); input()"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE) as router:
            assert router.stdout is not None and router.stdout.readline() == b"ready\n"
            (worker,) = psutil.Process(router.pid).children()
            router.kill()
        psutil.wait_procs([worker], timeout=5)
        assert has_ended(worker)

    def test_an_interrupt_is_not_for_them(self, echo: ChatTemplate) -> None:
        os.kill(children()[-1], signal.SIGINT)
        assert echo.render([user("still here")]) == "still here"


def children() -> list[int]:
    """Our child processes, the youngest last."""
    found = sorted(psutil.Process().children(), key=lambda process: process.create_time())
    return [process.pid for process in found]
