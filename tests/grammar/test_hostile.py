"""Grammars made to hurt: each is compiled or refused within limits, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from legato.grammar.checker import SECONDS
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.http.grammar import GrammarChecks
from tests.faults.loop_lag import Lag
from tests.grammar.texts import EOS, json_tokenizer, schema
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.usefixtures("small_heap")
T = TypeVar("T")
REGEX, LARK = GrammarKind.REGEX, GrammarKind.LARK


def run(work: Callable[[GrammarChecks], Awaitable[T]], num_processes: int = 1) -> T:
    async def main() -> T:
        tokenizer = json_tokenizer()
        processes = GrammarChecks(tokenizer, tokenizer.get_vocab_size(), [EOS], num_processes)
        try:
            return await work(processes)
        finally:
            processes.close()

    return asyncio.run(main())


async def verdict(processes: GrammarChecks, grammar: Grammar) -> str:
    """Empty for a grammar that may be used."""
    try:
        await processes.check(grammar)
    except GrammarError as error:
        return str(error)
    return ""


def one_of(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "string"}
    sides = [{"type": "object", "properties": {side: one_of(depth - 1)}, "required": [side]} for side in "ab"]
    return {"oneOf": [{**side, "additionalProperties": False} for side in sides]}


def arrays(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def properties(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(number)}}


FINE = {
    "oneOf nested 8 deep": schema(one_of(8)),
    "a repetition of repetitions": Grammar(REGEX, "(x{1,1000}){1,1000}"),
    "a million repetitions": Grammar(REGEX, "a{1,1000000}"),
    "an automaton of 2^18 states": Grammar(REGEX, "[ab]*a[ab]{18}"),
    "a million items": schema({"type": "array", "minItems": 1_000_000}),
    "10,000 values": schema({"enum": [f"value {i}" for i in range(10_000)]}),
    "300 optional properties": schema(properties(300)),
    "a schema in itself": schema({"type": "object", "properties": {"next": {"$ref": "#"}}}),
    "nested quantifiers": schema({"type": "string", "pattern": "^(a+)+$"}),
}
REFUSED = {
    "oneOf nested 12 deep": (schema(one_of(12)), "bytes"),
    "100,000 values": (schema({"enum": [f"value {i}" for i in range(100_000)]}), "bytes"),
    "5,000 optional properties": (schema(properties(5_000)), "too complex|to compile"),
    "60,000 parentheses": (Grammar(REGEX, "(" * 60_000 + "a" + ")" * 60_000), "nested"),
    "a schema nested 10,000 deep": (Grammar(GrammarKind.JSON_SCHEMA, arrays(10_000)), "nested too deeply"),
    "multiples of a large prime": (schema({"type": "integer", "multipleOf": 99_999_989}), "to compile"),
    "... hidden in a Lark grammar": (Grammar(LARK, 'start: %json {"multipleOf": 99999989}'), "to compile"),
    "16 patterns at once": (schema({"allOf": [{"pattern": f"{c}.*"} for c in "abcdefghijklmnop"]}), "too complex"),
    "a million short tokens": (Grammar(LARK, 'start: "a"{1000000}'), "too complex"),
}


@pytest.mark.parametrize("name", FINE)
def test_what_looks_dangerous_and_is_not_may_be_used(name: str) -> None:
    assert run(lambda processes: verdict(processes, FINE[name])) == ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_take_too_much_is_refused_in_time(name: str) -> None:
    grammar, reason = REFUSED[name]

    async def work(processes: GrammarChecks) -> tuple[str, float, str]:
        await processes.check(Grammar(REGEX, "a"))
        stopwatch = Stopwatch()
        refusal = await verdict(processes, grammar)
        return refusal, stopwatch.seconds, await verdict(processes, Grammar(REGEX, "b"))

    refusal, seconds, afterwards = run(work)
    assert re.search(reason, refusal)
    assert seconds < 2 * SECONDS
    assert afterwards == "", "the next grammar is checked as if nothing had happened"


def test_others_are_served_while_one_takes_its_time() -> None:
    slow = schema({"type": "integer", "multipleOf": 99_991})

    async def work(processes: GrammarChecks) -> tuple[float, list[float]]:
        await asyncio.gather(*(processes.check(Grammar(REGEX, "a")) for _ in range(2)))
        lag, answered = Lag(), []
        hanging = asyncio.create_task(lag.during(verdict(processes, slow)))
        while not hanging.done():
            stopwatch = Stopwatch()
            await processes.check(Grammar(REGEX, "b"))
            answered.append(stopwatch.seconds)
        return lag.worst, answered

    lag, answered = run(work, num_processes=2)
    assert lag < 0.02
    assert answered and max(answered) < 0.2


def test_a_process_that_is_killed_is_replaced() -> None:
    async def work(processes: GrammarChecks) -> str:
        await processes.check(Grammar(REGEX, "a"))
        (only,) = processes.processes.idle
        only.process.kill()
        only.process.wait()
        return await verdict(processes, Grammar(REGEX, "a"))

    assert run(work) == ""


def test_a_tokenizer_of_an_unknown_kind_is_a_reason_to_refuse_every_time() -> None:
    async def main() -> list[str]:
        class Strange:
            def to_str(self) -> str:
                return json.dumps({"version": "1.0"})

            def get_vocab_size(self) -> int:
                return 5

        processes = GrammarChecks(Strange(), 5, [EOS], 1)  # type: ignore[arg-type]
        return [await verdict(processes, Grammar(REGEX, "a")) for _ in range(2)]

    first, second = asyncio.run(main())
    assert "tokenizer cannot be used" in first
    assert first == second
