"""Error messages for grammars that cannot be enforced. llguidance's messages are translated here.

GrammarError              malformed, contradictory or too large
├── UnsupportedKeyword    well-formed, but asks for something that is not enforced: named, so that it can be removed
├── TooComplex            would take too much time or memory
└── MaskTimeout           took too much time in the middle of a text
"""

from __future__ import annotations

import json
import re

# Of llguidance's own words. Some of its messages quote the whole grammar.
_MAX_WORDS = 300
_CURE = "or start the server with --schema-lenient, which ignores what it cannot enforce"
_NOISE = "<non-verbose/>"


class GrammarError(Exception):
    """The message is for the client: it names the part of the grammar that is at fault."""


class UnsupportedKeyword(GrammarError):
    pass


class TooComplex(GrammarError):
    pass


class MaskTimeout(GrammarError):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"computing the allowed tokens took too long (more than {seconds:g} s)")


_TOO_COMPLEX = re.compile(r"too (big|large|complex|many)|max is \d|fuel|level exceeded|recursion limit", re.IGNORECASE)
_KEYS = re.compile(r"Unimplemented keys: (\[.*?\])")
_FORMAT = re.compile(r"(?:Unknown|Unimplemented) format: (\S+)")
_REFERENCE = re.compile(r"Resource '(.*?)' is not present in a registry")
_REGEX = re.compile(r"^error: (.+)$", re.MULTILINE)
_LOOKAROUND = re.compile(r"lookarounds not supported yet; (\w+)")


def from_message(message: str) -> GrammarError:
    """The error for what llguidance says about a grammar."""
    if found := _KEYS.search(message):
        return _unsupported(json.loads(found[1]))
    if "oneOf constraints are not supported" in message:
        return UnsupportedKeyword(
            f"`oneOf` is supported only where its options exclude each other: use `anyOf`, {_CURE}"
        )
    if "min/maxProperties" in message:
        return UnsupportedKeyword(
            "`minProperties` and `maxProperties` are supported only where all `properties` are required:"
            f" remove them, {_CURE}"
        )
    if found := _FORMAT.search(message):
        return UnsupportedKeyword(f"the `format` {found[1]} is not supported: remove it, {_CURE}")
    if found := _REFERENCE.search(message):
        return UnsupportedKeyword(f"`$ref` to {found[1]}: only references within the schema are followed")
    if found := _REGEX.search(message):
        return GrammarError(f"regex: {found[1]}")
    if found := _LOOKAROUND.search(message):
        return GrammarError(f"regex: look-around is not supported ({found[1]})")
    if "Unable to determine if regex is empty" in message:  # and then it quotes pages of them
        return TooComplex("too complex: it takes too long to see whether any string has all these patterns")
    if "NoExtension" in message:
        return GrammarError("no token of the model can continue the text as the grammar demands")
    words = _shortened(message)
    return TooComplex(f"too complex: {words}") if _TOO_COMPLEX.search(words) else GrammarError(words)


def from_warning(warning: str) -> str:
    """What was dropped from a schema that is read leniently."""
    if found := _KEYS.search(warning):
        return ", ".join(f"`{key}`" for key in json.loads(found[1]))
    if found := _FORMAT.search(warning):
        return f"`format` {found[1]}"
    return _shortened(warning)


def _unsupported(keys: list[str]) -> UnsupportedKeyword:
    names = ", ".join(f"`{key}`" for key in keys)
    if len(keys) == 1:
        return UnsupportedKeyword(f"the JSON schema keyword {names} is not supported: remove it, {_CURE}")
    return UnsupportedKeyword(f"the JSON schema keywords {names} are not supported: remove them, {_CURE}")


def _shortened(message: str) -> str:
    words = " ".join(message.replace(_NOISE, "").split())
    return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "..."
