"""Rows 17 to 20 of the fault table: grammars that take too much, never end, or lead nowhere."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import ASGIApp
from tokenizers import Tokenizer

from legato.common.errors import LegatoError
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.matcher import MaskWriter
from legato.grammar.rehearsal import rehearse
from legato.grammar.scanner import MAX_DIGITS
from legato.http.app import create_app
from legato.scheduling.state import Output
from tests.faults.loop_lag import Lag
from tests.grammar.texts import EOS, allowed_ids, begin, json_tokenizer, schema, trie_of, walk
from tests.http.asgi import LIMITS, SETTINGS, Answer, FakeBackend, post, token_ids
from tests.stopwatch import Stopwatch

NO_LAG = 0.02
REGEX = GrammarKind.REGEX


@asynccontextmanager
async def serving(backend: FakeBackend | None = None) -> AsyncIterator[ASGIApp]:
    """An application whose grammar processes run already: they start with the first grammar that comes."""
    tokenizer = Tokenizer.from_str(json_tokenizer().to_str())
    limits = replace(LIMITS, vocab_size=tokenizer.get_vocab_size())
    app = create_app(backend or FakeBackend(limits=limits), tokenizer, replace(SETTINGS, payload_limit=8_000_000))
    warm = [with_grammar(app, {"type": "regex", "value": text}) for text in "ab"]
    assert [answer.status for answer in await asyncio.gather(*warm)] == [200, 200]
    yield app


def asking_for(grammar: Any) -> bytes:
    return json.dumps({"inputs": "hi", "parameters": {"grammar": grammar}}).encode()


async def with_grammar(app: ASGIApp, grammar: Any) -> Answer:
    return await post(app, "/generate", asking_for(grammar))


async def watched(app: ASGIApp, body: bytes) -> tuple[Answer, float, float]:
    """The answer, how long it took, and by how much the event loop was late meanwhile."""
    lag, stopwatch = Lag(), Stopwatch()
    answer = await lag.during(post(app, "/generate", body))
    return answer, stopwatch.seconds, lag.worst


def one_of(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "string"}
    sides = [{"type": "object", "properties": {side: one_of(depth - 1)}, "required": [side]} for side in "ab"]
    return {"oneOf": [{**side, "additionalProperties": False} for side in sides]}


# ---- row 17 ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("regex", ["(x{1,1000}){1,1000}", "a{1,1000000}", "(a+)+b", "(.*a){25}", "[ab]*a[ab]{18}"])
def test_a_regex_that_explodes_elsewhere_is_compiled_or_refused_in_a_tenth_of_a_second(regex: str) -> None:
    async def main() -> None:
        async with serving() as app:
            # Each differs, so that none is remembered.
            bodies = [asking_for({"type": "regex", "value": regex + "z" * i}) for i in range(1, 4)]
            tries = [await watched(app, body) for body in bodies]
        assert {answer.status for answer, _, _ in tries} <= {200, 422}
        assert min(seconds for _, seconds, _ in tries) <= 0.1
        assert min(lag for _, _, lag in tries) <= NO_LAG

    asyncio.run(main())


# ---- row 18 ----------------------------------------------------------------------------------------------------------

SCHEMAS: dict[str, tuple[Any, int, str]] = {
    "oneOf nested 12 deep": (one_of(12), 422, "bytes"),
    "oneOf nested 8 deep": (one_of(8), 200, ""),
    "100,000 values": ({"enum": [f"value {i}" for i in range(100_000)]}, 422, "bytes"),
    "5,000 properties": (
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5_000)}},
        422,
        "too complex|to compile",
    ),
    "a reference to elsewhere": ({"$ref": "http://127.0.0.1:9/schema.json"}, 422, "only references within the schema"),
    "a reference to a file": ({"$ref": "file:///etc/passwd"}, 422, "only references within the schema"),
    "a reference to itself": ({"type": "object", "properties": {"next": {"$ref": "#"}}}, 200, ""),
    "nothing but a reference to itself": ({"$ref": "#"}, 422, ""),
    "an unknown keyword": ({"type": "array", "contains": {"type": "null"}}, 422, "`contains`"),
    "two unknown keywords": ({"type": "array", "contains": {}, "uniqueItems": True}, 422, "`uniqueItems`"),
    "a multiple of a large prime": ({"type": "integer", "multipleOf": 99_999_989}, 422, "to compile"),
}


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_made_to_hurt_is_answered_in_time_and_others_notice_nothing(name: str) -> None:
    wanted, status, words = SCHEMAS[name]

    body = asking_for({"type": "json", "value": wanted})

    async def main() -> None:
        async with serving() as app:
            hostile = asyncio.create_task(watched(app, body))
            others = []
            while not hostile.done():
                stopwatch, used = Stopwatch(), time.process_time()
                assert (await post(app, "/generate", {"inputs": "hi"})).status == 200
                # What the grammar's process used meanwhile is no time of this request.
                others.append(stopwatch.seconds_of(time.process_time() - used))
                await asyncio.sleep(0.002)
            answer, seconds, lag = await hostile
        assert answer.status == status, answer.body
        assert any(word in answer.body.decode() for word in words.split("|"))
        assert seconds <= 3
        assert lag <= NO_LAG
        assert sorted(others)[len(others) * 99 // 100] <= 0.1

    asyncio.run(main())


# ---- row 19 ----------------------------------------------------------------------------------------------------------

TRIE = trie_of(json_tokenizer())
WRITER = MaskWriter(TRIE, num_threads=1)
ANYTHING: dict[str, Any] = {}


def prefers(letters: str) -> Any:
    """A model that writes nothing but these letters as long as it may."""
    data = {token_id: TRIE.bytes_of(token_id) for token_id in range(TRIE.vocab_size)}
    only = {token_id for token_id in data if data[token_id] and set(data[token_id]) <= set(letters.encode())}

    def choose(allowed: list[int]) -> int:
        loved = [token_id for token_id in allowed if token_id in only]
        if loved:
            return max(loved, key=lambda token_id: len(data[token_id]))
        return EOS if EOS in allowed else allowed[0]

    return choose


@pytest.mark.parametrize(
    "wanted", [ANYTHING, {"type": "number"}, {"type": "integer"}, {"type": "number", "minimum": 3}]
)
@pytest.mark.parametrize("letters", ["0123456789", "9", "0", "0.", "1e9", "-0.e+"])
def test_a_number_without_bounds_ends(wanted: Any, letters: str) -> None:
    text = walk(schema(wanted), prefers(letters), TRIE, WRITER)
    json.loads(text)
    # A token may bring several digits, the last of them over the limit.
    assert sum(letter.isdigit() for letter in text) <= MAX_DIGITS + 8


@pytest.mark.parametrize(
    ("wanted", "opening"), [(ANYTHING, "{"), (ANYTHING, "["), ({"type": "object"}, "{"), ({"type": "array"}, "[")]
)
@pytest.mark.parametrize("letters", [" ", "\n", " \t\r\n"])
def test_white_space_ends(wanted: Any, opening: str, letters: str) -> None:
    matcher = begin(schema(wanted), TRIE)
    matcher.accept(json_tokenizer().encode(opening).ids, TRIE)
    choose, written = prefers(letters), b""
    while True:
        WRITER.fill_masks([matcher])
        token_id = choose(allowed_ids(matcher))
        data = TRIE.bytes_of(token_id)
        if not set(data) <= set(letters.encode()):
            break
        written += data
        assert len(written) <= 8
        matcher.accept([token_id], TRIE)


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("name", [name for name, (_, status, words) in SCHEMAS.items() if words == "bytes"])
def test_too_large_a_schema_is_as_cheap_to_refuse_for_openais_clients(name: str) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "large", "schema": SCHEMAS[name][0]}}
    body = json.dumps({"prompt": "hi", "max_tokens": 3, "response_format": shape}).encode()

    async def main() -> None:
        async with serving() as app:
            lag = Lag()
            answer = await lag.during(post(app, "/v1/completions", body))
        assert answer.status == 400, answer.body
        assert "bytes" in answer.body.decode()
        assert lag.worst <= NO_LAG

    asyncio.run(main())


# ---- row 20 ----------------------------------------------------------------------------------------------------------

DEAD_ENDS = {
    "nothing matches": schema({"type": "integer", "minimum": 5, "maximum": 4}),
    "no value": schema({"enum": []}),
    "never": schema({"not": {}}),
    "false": Grammar(GrammarKind.JSON_SCHEMA, "false"),
    "opposites": schema({"allOf": [{"const": "a"}, {"const": "b"}]}),
    "an empty class": Grammar(REGEX, r"a[^\s\S]b"),
}


@pytest.mark.parametrize("name", DEAD_ENDS)
def test_a_grammar_that_no_text_can_follow_is_refused_before_anything_runs(name: str) -> None:
    with pytest.raises(GrammarError):
        rehearse(DEAD_ENDS[name], TRIE, WRITER)


def test_a_text_whose_next_token_the_model_does_not_have_ends_with_an_error() -> None:
    """The tokenizer could write it, the model has no row for it."""
    tokenizer = json_tokenizer()
    letters = [tokenizer.token_to_id(letter) for letter in "ab"]
    small = trie_of(tokenizer, vocab_size=max(letters))
    writer, matcher = MaskWriter(small, num_threads=1), begin(Grammar(REGEX, "ab"), small)
    matcher.accept(letters[:1], small)
    writer.fill_masks([matcher])
    assert matcher.mask is None
    assert matcher.error == "no token of the model can continue the text as the grammar demands"


class Lost(FakeBackend):
    async def prepare(self, grammar: Grammar) -> None:
        raise LegatoError("the shards are gone")


def test_a_dead_end_in_the_middle_of_an_answer_is_a_typed_error() -> None:
    tokens = [Output(token_id=token_ids("a")[0]), Output(error="no token of the model can continue the text")]

    async def main() -> None:
        for path in ("/generate", "/generate_stream"):
            async with asyncio.timeout(5):
                app = create_app(FakeBackend(lambda request: tokens), json_tokenizer(), SETTINGS)
                answer = await post(app, path, {"inputs": "hi"})
            error = answer.events()[-1] if path.endswith("stream") else answer.json()
            assert error["error_type"] == "generation" and "no token" in error["error"]

    asyncio.run(main())


def test_shards_that_are_lost_while_a_grammar_is_prepared_are_a_typed_error() -> None:
    async def main() -> None:
        app = create_app(Lost(), json_tokenizer(), SETTINGS)
        answer = await with_grammar(app, {"type": "regex", "value": "a"})
        assert (answer.status, answer.json()["error_type"]) == (424, "generation")

    asyncio.run(main())
