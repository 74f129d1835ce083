from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from legato.chat.reasoning.formats import HARMONY_TOKENS
from legato.chat.reasoning.harmony import HarmonyParser
from legato.chat.tools.dialects import DIALECTS, HERMES, JSON, Dialect
from legato.chat.tools.enforcement import call_grammar, call_schema
from legato.chat.tools.parser import CallParser, ParsedMessage
from legato.chat.tools.requests import Tool, tool_use_of
from legato.grammar.compile import compile_grammar
from legato.grammar.errors import GrammarError, UnsupportedKeyword
from legato.grammar.kinds import GrammarKind
from legato.grammar.matcher import MaskWriter, Matcher
from legato.grammar.scanner import MAX_DIGITS
from legato.grammar.vocabulary import TokenTrie
from tests.http import asgi

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "$ref": {"type": "string"}},
    "required": ["root"],
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"enum": [{"$ref": "#/data"}, 2]}},
            "additionalProperties": False,
        }
    },
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tools(**schemas: Any) -> tuple[Tool, ...]:
    functions = [{"type": "function", "function": {"name": name, "parameters": s}} for name, s in schemas.items()]
    use = tool_use_of(functions, "required")
    assert use is not None
    return use.forced


TOOLS = tools(weather=CITY, plant=TREE, now=None)


@cache
def vocabulary() -> tuple[Tokenizer, TokenTrie, dict[str, int]]:
    """Some markers are special, some only added, some are mere text."""
    tokenizer = Tokenizer.from_str(asgi.tokenizer().to_str())
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    trie = TokenTrie(tokenizer.to_str(), tokenizer.get_vocab_size(), tokenizer.get_vocab_size(), [asgi.EOS])
    added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    return tokenizer, trie, {name: added[name] for name in ("[TOOL_CALLS]", "<tool_call>")}


def allowed(
    dialect: Dialect,
    text: str,
    *,
    several: bool = False,
    among: tuple[Tool, ...] = TOOLS,
    answer: dict[str, Any] | None = None,
) -> bool:
    """Whether the text is complete."""
    tokenizer, trie, tokens = vocabulary()
    grammar = call_grammar(dialect, among, tokens, several=several, answer=answer)
    matcher = compile_grammar(grammar, trie)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
OTHER = '{"name": "now", "arguments": {}}'
ONE = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "llama3": CALL.replace("arguments", "parameters"),
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}',
    "json": CALL.replace("arguments", "parameters"),
}
# Whose calls are JSON objects with a name.
NAMED = [name for name in DIALECTS if name != "harmony"]
TWO = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>",
    "mistral": f"[TOOL_CALLS][{CALL}, {OTHER}]",
    "json": f"[{CALL}, {OTHER}]".replace("arguments", "parameters"),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_one_call_in_the_words_of_the_dialect(name: str) -> None:
    dialect = DIALECTS[name]
    assert allowed(dialect, ONE[name])
    assert allowed(dialect, ONE[name], several=True)
    assert not allowed(dialect, ONE[name].replace("city", "town"))
    assert not allowed(dialect, ONE[name].replace("weather", "nothing"))
    assert not allowed(dialect, "text " + ONE[name])


@pytest.mark.parametrize("name", TWO)
def test_several_calls_only_where_they_are_allowed(name: str) -> None:
    assert allowed(DIALECTS[name], TWO[name], several=True)
    assert not allowed(DIALECTS[name], TWO[name])


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_a_call_or_a_text_of_a_schema(name: str, several: bool) -> None:
    dialect = DIALECTS[name]
    tree = '{"root": {"left": {"value": 2}}}'
    assert allowed(dialect, ONE[name], several=several, answer=TREE)
    assert allowed(dialect, tree, several=several, answer=TREE)
    assert not allowed(dialect, tree.replace("2", "3"), several=several, answer=TREE)
    assert not allowed(dialect, "text", several=several, answer=TREE)
    assert not allowed(dialect, tree + ONE[name], several=several, answer=TREE)
    assert not allowed(dialect, tree, several=several)


def test_a_call_in_a_channel_may_follow_reasoning() -> None:
    reasoning = "<|channel|>analysis<|message|>Oslo, then.<|end|><|start|>assistant"
    assert allowed(DIALECTS["harmony"], reasoning + ONE["harmony"])
    parser, message = HarmonyParser({"weather"}), ParsedMessage()
    message.add(parser.feed(reasoning + ONE["harmony"]) + parser.finish())
    assert (message.content, message.reasoning) == ("", "Oslo, then.")
    assert [(call.name, call.arguments) for call in message.calls] == [("weather", '{"city": "Oslo"}')]


def test_channels_may_be_tokens_of_their_own() -> None:
    """Which no text matches, as in gpt-oss."""
    tokenizer = Tokenizer.from_str(asgi.tokenizer().to_str())
    tokenizer.add_special_tokens(list(HARMONY_TOKENS))
    trie = TokenTrie(tokenizer.to_str(), tokenizer.get_vocab_size(), tokenizer.get_vocab_size(), [asgi.EOS])
    tokens = {name: tokenizer.token_to_id(name) for name in HARMONY_TOKENS}
    start = compile_grammar(call_grammar(DIALECTS["harmony"], TOOLS, tokens, several=False), trie)
    reasoning = "<|channel|>analysis<|message|>Is Oslo <b>cold</b>?<|end|><|start|>assistant"
    for text, fits in ((reasoning + ONE["harmony"], True), ("<|channel|>final<|message|>x", False)):
        matcher, ids = start.deep_copy(), tokenizer.encode(text, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits


@pytest.mark.parametrize("name", NAMED)
def test_what_the_grammar_allows_is_what_the_parser_reads(name: str) -> None:
    for text, num_calls in ((ONE[name], 1), (TWO.get(name, ONE[name]), 2 if name in TWO else 1)):
        parser, message = CallParser(DIALECTS[name], {"weather", "now"}), ParsedMessage()
        message.add(parser.feed(text) + parser.finish())
        assert (message.content, len(message.calls)) == ("", num_calls)


def test_each_tool_has_its_own_arguments() -> None:
    assert not allowed(JSON, '{"name": "now", "parameters": {"city": "Oslo"}}')
    assert not allowed(JSON, '{"name": "weather", "parameters": {}}')


def test_references_are_to_the_tools_own_schema() -> None:
    nested = '{"name": "plant", "parameters": {"root": {"left": {"left": {"value": 2}}}, "$ref": "x"}}'
    assert allowed(JSON, nested)
    assert not allowed(JSON, nested.replace("2", "3"))
    assert allowed(JSON, nested.replace("2", '{"$ref": "#/data"}'))
    assert allowed(JSON, nested, among=tools(now=None, plant=TREE))


def test_a_function_takes_no_parameters_that_it_does_not_declare() -> None:
    assert not allowed(JSON, '{"name": "weather", "parameters": {"city": "Oslo", "more": 1}}')
    free = tools(f={**CITY, "additionalProperties": True}, g={"type": "object"})
    assert allowed(JSON, '{"name": "f", "parameters": {"city": "Oslo", "more": 1}}', among=free)
    assert allowed(JSON, '{"name": "g", "parameters": {"more": 1}}', among=free)


def test_nor_do_the_objects_among_them() -> None:
    place = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
    several = {"type": "object", "properties": {"places": {"type": "array", "items": place}}}
    among = tools(f=place, g=several)
    assert allowed(JSON, '{"name": "f", "parameters": {"city": {"city": "Oslo"}}}', among=among)
    assert not allowed(JSON, '{"name": "f", "parameters": {"city": {"city": "Oslo", "more": 1}}}', among=among)
    assert allowed(JSON, '{"name": "g", "parameters": {"places": [{"city": {"city": "Oslo"}}]}}', among=among)
    assert not allowed(
        JSON, '{"name": "g", "parameters": {"places": [{"city": {"city": "Oslo"}, "b": 1}]}}', among=among
    )


@pytest.mark.parametrize("word", ["allOf", "anyOf"])
def test_what_is_declared_elsewhere_is_declared(word: str) -> None:
    named = {"properties": {"name": {"type": "string"}}, "required": ["name"]}
    both = {"type": "object", word: [named], "properties": {"city": {"type": "object"}}}
    text = '{"name": "f", "parameters": {"where": {"name": "Oslo", "city": {"anything": 1}}}}'
    assert allowed(JSON, text, among=tools(f={"type": "object", "properties": {"where": both}}))


def test_what_is_unsupported_is_named() -> None:
    _, trie, tokens = vocabulary()
    odd = tools(f={"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "null"}}}})
    for dialect in (JSON, HERMES):
        with pytest.raises(UnsupportedKeyword, match="`contains`"):
            compile_grammar(call_grammar(dialect, odd, tokens, several=False), trie)


def test_a_lenient_grammar_ignores_what_is_unsupported() -> None:
    _, trie, tokens = vocabulary()
    odd = tools(f={"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "null"}}}})
    compile_grammar(call_grammar(HERMES, odd, tokens, several=False, schema_lenient=True), trie)


def test_dialects_of_plain_json_are_schemas_so_that_everything_about_schemas_holds_for_them() -> None:
    grammar = call_grammar(JSON, TOOLS, {}, several=True)
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar.value)["$defs"] == call_schema(JSON, TOOLS)["$defs"]


def test_a_reference_to_nowhere_is_an_error() -> None:
    _, trie, tokens = vocabulary()
    lost = tools(f={"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}})
    with pytest.raises(GrammarError):
        compile_grammar(call_grammar(JSON, lost, tokens, several=False), trie)


@pytest.mark.parametrize("name", NAMED)
def test_a_call_whose_number_has_no_bounds_ends(name: str) -> None:
    """The model prefers zeros, and takes another token only where zeros are not allowed."""
    tokenizer, trie, tokens = vocabulary()
    among = tools(wait={"type": "object", "properties": {"seconds": {"type": "number"}}, "required": ["seconds"]})
    grammar = call_grammar(DIALECTS[name], among, tokens, several=False)
    beginning = ONE[name].partition('"')[0] + f'"name": "wait", "{DIALECTS[name].arguments}": {{"seconds": '
    ids = tokenizer.encode(beginning, add_special_tokens=False).ids
    matcher, writer = Matcher(compile_grammar(grammar, trie), has_json=grammar.has_json), MaskWriter(trie, 1)
    matcher.accept(ids, trie)
    zero, one = (tokenizer.token_to_id(digit) for digit in "01")
    allowed_zeros = 0
    while allowed_zeros <= MAX_DIGITS:
        writer.fill_masks([matcher])
        assert matcher.mask is not None, matcher.error
        if not matcher.mask[zero // 32] >> zero % 32 & 1:
            break
        matcher.accept([zero if allowed_zeros else one], trie)
        allowed_zeros += 1
    assert allowed_zeros == MAX_DIGITS
