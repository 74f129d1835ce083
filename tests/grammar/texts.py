"""A small vocabulary with tokens of several bytes, texts under a mask, and a judge of JSON that is not llguidance."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from legato.grammar.compile import compile_grammar
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.matcher import MaskWriter, Matcher
from legato.grammar.vocabulary import TokenTrie

EOS = 1
Choose = Callable[[list[int]], int]

_CORPUS = [
    '{"name": "Ada", "age": 36, "tags": ["a", "b"], "note": null}',
    '[{"x": 1.5, "y": -20}, {"x": 0.25, "y": 100000}]',
    '{"ok": true, "no": false, "when": "2024-01-31", "who": "someone else", "n": 00000000}',
    "yes, no, maybe; the quick brown fox jumps over the lazy dog. 0123456789 éèü 😀",
]


@cache
def json_tokenizer() -> Tokenizer:
    """Byte-level, so that every text has tokens, with merges, so that many of them cross what a lexer calls a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<pad>", "</s>", "<tool>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def trie_of(tokenizer: Tokenizer, vocab_size: int | None = None) -> TokenTrie:
    size = tokenizer.get_vocab_size()
    return TokenTrie(tokenizer.to_str(), size, vocab_size or size + 7, [EOS])


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def allowed_ids(matcher: Matcher) -> list[int]:
    assert matcher.error is None, matcher.error
    assert matcher.mask is not None
    return np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist()


def begin(grammar: Grammar, trie: TokenTrie) -> Matcher:
    return Matcher(compile_grammar(grammar, trie), has_json=grammar.has_json)


def accepts(grammar: Grammar, text: str, trie: TokenTrie, writer: MaskWriter) -> bool:
    """Whether every token of the text is allowed where it stands, and the end after the last one."""
    matcher = begin(grammar, trie)
    for token_id in [*json_tokenizer().encode(text).ids, EOS]:
        writer.fill_masks([matcher])
        if token_id not in allowed_ids(matcher):
            return False
        matcher.accept([token_id], trie)
    return True


def walk(grammar: Grammar, choose: Choose, trie: TokenTrie, writer: MaskWriter, most: int = 300) -> str:
    """A text of tokens that the masks allow, until the end is chosen."""
    matcher = begin(grammar, trie)
    ids: list[int] = []
    while True:
        writer.fill_masks([matcher])
        token_id = choose(allowed_ids(matcher))
        if token_id == EOS:
            return trie.tokenizer.decode_bytes(ids).decode()
        ids.append(token_id)
        assert len(ids) < most, trie.tokenizer.decode_str(ids)
        matcher.accept([token_id], trie)


def at_random(seed: int, trie: TokenTrie) -> Choose:
    """Any token at first; more and more often those that bring a JSON text to its end."""
    rng = random.Random(seed)
    closing = [(EOS,), *(tuple(json_tokenizer().encode(text).ids) for text in ('"', "}", "]", "0", "1", "e", ",", ":"))]
    steps = 0

    def choose(allowed: list[int]) -> int:
        nonlocal steps
        steps += 1
        if rng.random() < steps / 60:
            for (token_id,) in closing:
                if token_id in allowed:
                    return token_id
        return rng.choice(allowed)

    return choose


def conforms(value: Any, wanted: Any, root: Any = None) -> bool:
    """A judge for the keywords that the tests use."""
    root = wanted if root is None else root
    if "$ref" in wanted:
        return conforms(value, root["$defs"][wanted["$ref"].rpartition("/")[2]], root)
    if "anyOf" in wanted and not any(conforms(value, option, root) for option in wanted["anyOf"]):
        return False
    if "enum" in wanted and value not in wanted["enum"]:
        return False
    if "type" in wanted and not _has_type(value, wanted["type"]):
        return False
    if isinstance(value, dict):
        return _object_conforms(value, wanted, root)
    if isinstance(value, list):
        low, high = wanted.get("minItems", 0), wanted.get("maxItems", len(value))
        return low <= len(value) <= high and all(conforms(item, wanted.get("items", {}), root) for item in value)
    if isinstance(value, str):
        low, high = wanted.get("minLength", 0), wanted.get("maxLength", len(value))
        return low <= len(value) <= high and re.search(wanted.get("pattern", ""), value) is not None
    if isinstance(value, bool) or value is None:
        return True
    return wanted.get("minimum", value) <= value <= wanted.get("maximum", value)  # type: ignore[no-any-return]


def _has_type(value: Any, name: str | list[str]) -> bool:
    if isinstance(name, list):
        return any(_has_type(value, each) for each in name)
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "number": (int, float),
        "integer": int,
    }  # fmt: skip
    return isinstance(value, kinds[name]) and (name == "boolean" or not isinstance(value, bool))


def _object_conforms(value: dict[str, Any], wanted: Any, root: Any) -> bool:
    properties, others = wanted.get("properties", {}), wanted.get("additionalProperties", {})
    if not set(wanted.get("required", ())) <= value.keys():
        return False
    for name, item in value.items():
        rule = properties.get(name, others)
        if rule is False or not conforms(item, {} if rule is True else rule, root):
            return False
    return True
