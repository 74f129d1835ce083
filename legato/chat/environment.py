"""The Jinja environment of chat templates: the immutable sandbox, with the extensions of transformers.

Templates come with models, and models come from anywhere. The sandbox keeps templates away from Python's internals;
time and memory are limited by the process that they run in (`worker.py`). Operators that make much of little are
refused here, because a process that has to be killed takes its time and a second process with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Bits of a number, and items of a string or list, that an operator may make.
MAX_BITS = 4096
MAX_REPEATED = 1_000_000


class ChatEnvironment(ImmutableSandboxedEnvironment):
    # Also keeps the optimizer from computing them when the template is compiled.
    intercepted_binops = frozenset({"**", "*"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        self.filters["tojson"] = to_json
        self.globals.update(
            raise_exception=raise_exception, strftime_now=strftime_now, dict=PlainDict(), namespace=PublicNamespace
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise SecurityError(f"the result of {operator} has more than {MAX_BITS} bits")
        elif operator == "*" and _num_repeated(left, right) > MAX_REPEATED:
            raise SecurityError(f"the result of * has more than {MAX_REPEATED} characters or items")
        return super().call_binop(context, operator, left, right)


def _num_repeated(left: Any, right: Any) -> int:
    """What `left * right` has of characters or items; 0 if it is a number."""
    items, count = (right, left) if isinstance(left, int) else (left, right)
    return len(items) * count if isinstance(items, str | list | tuple) and isinstance(count, int) else 0


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the model is trained to say. For a prompt it only passes its body on.

    It is a call block because that is what transformers makes of it: names that are set in the body stay in the body.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_say"), [], [], body).set_lineno(line)

    def _say(self, caller: Callable[[], str]) -> str:
        return caller()


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it in training; Jinja's own filter escapes what means something in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class PlainDict:
    """`dict` in templates: makes dictionaries, but is not the type with all that hangs on it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class PublicNamespace(Namespace):
    """`namespace` in templates, without names that Python itself might look up."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_public(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute {name!r}; its name must not begin with '_'")
