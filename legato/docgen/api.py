"""Generates docs/api.md from the OpenAPI document: `legato api > docs/api.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from legato.http.openapi import document
from legato.ipc.settings import EmbeddingSettings, RouterSettings

Json = dict[str, Any]

INTRODUCTION = """\
# HTTP API

<!-- Written by `legato api > docs/api.md`. Edit legato/http/operations.py and the structs that it lists instead. -->

A running server serves the same reference as a web page at `/docs` and as an OpenAPI document at
`/api-doc/openapi.json`.

Bodies are JSON in UTF-8; the content type is not checked. Unknown fields are ignored, and `null` means the default
everywhere. Streams are server-sent events: a line `data: {{...}}` and an empty line for each event, and a comment line
`:` after {keep_alive:g} seconds without an event. Closing the connection cancels the request.

[compatibility.md](compatibility.md) lists the differences from text-generation-inference.
"""
EMBEDDING = """\
## Routes of embedding servers

With `--task embed` ([embeddings.md](embeddings.md)) a server has these routes instead of the generation routes; the
routes for health, metrics, models and tokenization are the same. `POST /` is `/embed`, `/rerank` or `/predict`,
depending on the model, and `GET /info` has the fields of [EmbeddingServerInfo](#embeddingserverinfo).
"""
_REFERENCE = re.compile(r'"#/components/schemas/(\w+)"')
# Bounds of JSON Schema for the reader.
_BOUNDS = {"exclusiveMinimum": "> {}", "minimum": ">= {}", "exclusiveMaximum": "< {}", "maximum": "<= {}"}


def reference_page() -> str:
    """The whole page, in Markdown."""
    settings = RouterSettings(model_id="any model")
    api, embedding = document(settings), _embedding_document(settings)
    types: Json = api["components"]["schemas"] | embedding["components"]["schemas"]
    operations = [*_operations(api), *_operations(embedding)]
    taken = _reachable([operation["requestBody"] for *_, operation in operations if "requestBody" in operation], types)
    sections = [INTRODUCTION.format(keep_alive=settings.keep_alive)]
    sections += ["## Routes\n", _table(("route", "purpose"), _routes(api))]
    sections += [_operation(path, method, operation) for path, method, operation in _operations(api)]
    sections += [EMBEDDING, _table(("route", "purpose"), _routes(embedding))]
    sections += [_operation(path, method, operation) for path, method, operation in _operations(embedding)]
    sections += ["## Errors\n", _table(("status", "meaning", "routes", "body"), _errors(api))]
    sections += ["## Request types\n", *(_request_type(name, types[name]) for name in types if name in taken)]
    sections += ["## Response types\n", *(_response_type(name, types[name]) for name in types if name not in taken)]
    return "\n".join(sections)


def _embedding_document(settings: RouterSettings) -> Json:
    """With the routes that only servers have that embed texts."""
    known = set(document(settings)["paths"])
    api = document(replace(settings, embedding=EmbeddingSettings(size=384, pooling="mean")))
    api["paths"] = {path: methods for path, methods in api["paths"].items() if path not in known}
    return api


def schema() -> str:
    """The OpenAPI document itself, for programs."""
    return json.dumps(document(RouterSettings(model_id="any model")), indent=2)


def _reachable(start: Any, types: Json) -> set[str]:
    """Names of the types that something refers to, directly or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        names = set(_REFERENCE.findall(json.dumps(waiting.pop()))) - found
        found |= names
        waiting += [types[name] for name in names]
    return found


def _operations(api: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _routes(api: Json) -> Iterator[tuple[str, ...]]:
    for path, method, operation in _operations(api):
        title = _title(path, method)
        yield f"[`{title}`](#{_anchor(title)})", operation["summary"]


def _operation(path: str, method: str, operation: Json) -> str:
    parts = [
        f"### {_title(path, method)}\n",
        f"{operation['summary']}. {operation.get('description', '')}".strip() + "\n",
    ]
    if parameters := operation.get("parameters"):
        rows = ((f"`{each['name']}`", _name(each["schema"]), f"in the {each['in']}") for each in parameters)
        parts.append(_table(("parameter", "type", "where"), rows))
    if body := operation.get("requestBody"):
        ((_, content),) = body["content"].items()
        parts.append(f"Takes {_name(content['schema'])}:\n\n```json\n{json.dumps(content['example'], indent=2)}\n```\n")
    parts.append(_table(("status", "answer"), _answers(operation["responses"])))
    return "\n".join(parts)


def _answers(responses: Json) -> Iterator[tuple[str, str]]:
    for status, response in responses.items():
        bodies = [f"{_name(each['schema'])} as `{kind}`" for kind, each in response.get("content", {}).items()]
        if status == "200":
            yield status, ", or ".join(bodies) or "no body"
        else:
            yield status, response["description"]


def _errors(api: Json) -> Iterator[tuple[str, ...]]:
    """Every error once, with its routes: native ones and OpenAI's differ in body and status."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for path, method, operation in _operations(api):
        for status, response in operation["responses"].items():
            if status != "200":
                example = json.dumps(response["content"]["application/json"]["example"])
                seen.setdefault((status, response["description"], example), []).append(_title(path, method))
    for (status, description, example), titles in sorted(seen.items()):
        yield status, description, ", ".join(f"`{title}`" for title in titles), f"`` {example} ``"


def _request_type(name: str, schema: Json) -> str:
    """A type that clients write: `null` equals absent everywhere, so the default is shown."""
    required = schema.get("required", [])
    rows = (
        (f"`{each}`", _bounded(field), _default(field, each in required), field.get("description", ""))
        for each, field in schema["properties"].items()
    )
    return _heading(name, schema) + _table(("field", "type", "default", "meaning"), rows)


def _response_type(name: str, schema: Json) -> str:
    """A type that clients read: shows what may be null or missing."""
    if "properties" not in schema:
        return f"{_heading(name, schema)}{_name(schema)}\n"
    required = schema.get("required", [])
    rows = (
        (f"`{each}`", _nullable(field, each in required or "default" in field), field.get("description", ""))
        for each, field in schema["properties"].items()
    )
    return _heading(name, schema) + _table(("field", "type", "meaning"), rows)


def _heading(name: str, schema: Json) -> str:
    return f"### {name}\n\n" + (f"{schema['description']}\n\n" if "description" in schema else "")


def _bounded(field: Json) -> str:
    """The type with its bounds. Only those of the field itself: the ones inside are widths of integers."""
    bounds = [words.format(f"{field[key]:g}") for key, words in _BOUNDS.items() if abs(field.get(key, 2**63)) < 2**63]
    return ", ".join([_name(field), *bounds])


def _nullable(field: Json, always: bool) -> str:
    return _name(field) + _or_null(field) + ("" if always else ", or missing")


def _default(field: Json, required: bool) -> str:
    if required:
        return "required"
    return f"`{json.dumps(field['default'])}`" if field.get("default") is not None else ""


def _name(schema: Json) -> str:
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{_anchor(name)})"
    if kinds := schema.get("anyOf"):
        return " or ".join(_name(kind) for kind in kinds if kind != {"type": "null"})
    if values := schema.get("enum"):
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {_inner(schema['items'])}" if schema.get("items") else "list"
    if isinstance(values := schema.get("additionalProperties"), dict) and values:
        return f"object of {_inner(values)}"
    return str(schema.get("type", "anything"))


def _or_null(schema: Json) -> str:
    return " or null" if {"type": "null"} in schema.get("anyOf", ()) else ""


def _inner(schema: Json) -> str:
    """A type in a list or an object, where null does not equal absent."""
    name = _name(schema) + _or_null(schema)
    return f"({name})" if " or " in name else name


def _title(path: str, method: str) -> str:
    return f"{method.upper()} {path}"


def _anchor(heading: str) -> str:
    """The link that Markdown viewers give a heading: lower case, words joined by hyphens, punctuation dropped."""
    return "".join(letter for letter in heading.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def _table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(header) + " |", "|---" * len(header) + "|", *lines, ""])
