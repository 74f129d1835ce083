"""Requests made from the OpenAPI document, right and wrong ones, and what every answer to them must be like."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, BaseSchema, Case, GenerationMode, Response, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

# Requests to all operations together. `make fuzz` asks for more, and for others every time.
CASES = int(os.environ.get("FUZZ_CASES", "2000"))
ALWAYS_THE_SAME = "FUZZ_CASES" not in os.environ
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Takes a whole chat request, but only what becomes of the messages matters to it.
TOLERANT = "POST /chat_tokenize"
BOTH = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)

Operation = APIOperation[Any, Any, Any, Any]
Send = Callable[[Case], Response]


def read(document: dict[str, Any]) -> BaseSchema:
    """The document as schemathesis understands it.

    Ours says what the data of an event is, as TGI's does. Schemathesis wants the whole event described: an object of
    strings, one of which is `data` and may hold JSON.
    """
    document = copy.deepcopy(document)
    for methods in document["paths"].values():
        for operation in methods.values():
            for response in operation["responses"].values():
                events = response.get("content", {}).get("text/event-stream")
                if events is not None:
                    events["schema"] = {"anyOf": [_event(data) for data in events["schema"]["anyOf"]]}
    return openapi.from_dict(document)


def _event(data: dict[str, Any]) -> dict[str, Any]:
    # Events of the APIs whose events have types are called like those.
    name = {"type": "string"} if "discriminator" in data else {"const": "message"}
    if "enum" not in data:  # which are texts as they stand
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    # Other events have no names, which is the same as being called "message".
    properties = {"data": data, "event": name}
    return {"type": "object", "required": ["data"], "properties": properties, "additionalProperties": False}


def operations(schema: BaseSchema) -> list[Operation]:
    return [result.ok() for result in schema.get_all_operations()]


def sendings(found: list[Operation]) -> list[tuple[Operation, GenerationMode]]:
    """Operations with the kind of data to send. Where there is nothing to send there is nothing wrong to send."""
    return [(operation, mode) for operation in found for mode in (BOTH if operation.body else BOTH[:1])]


def fuzz(operation: Operation, mode: GenerationMode, num_cases: int, send: Send) -> int:
    """How many requests were sent. Raises at the first answer that is not as it should be."""
    num_sent = 0
    must_refuse = mode is GenerationMode.NEGATIVE and operation.label != TOLERANT

    @settings(
        max_examples=num_cases,
        derandomize=ALWAYS_THE_SAME,
        database=None,
        deadline=None,
        print_blob=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def conforms(case: Case) -> None:
        nonlocal num_sent
        num_sent += 1
        response = send(case)
        # Native streams say what is wrong among their events, with status 200, as TGI's do.
        streams = response.headers.get("content-type") == ["text/event-stream"]
        refusal = [negative_data_rejection] if must_refuse and not streams else []
        case.validate_response(response, checks=CHECKS + refusal)

    conforms()
    return num_sent
