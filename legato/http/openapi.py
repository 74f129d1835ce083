"""The OpenAPI document of the routes in `operations.py`, with schemas from the request and response structs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec

from legato.api.anthropic.responses import AnthropicError
from legato.api.errors import (
    CompressedBody,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    TimedOut,
    Unhealthy,
    UnknownModel,
)
from legato.api.native import ErrorResponse
from legato.api.openai.responses import OpenAIError
from legato.chat.template import TemplateError
from legato.http.auth import Unauthorized
from legato.http.operations import Operation
from legato.http.routes import health
from legato.http.routes.anthropic import errors as anthropic_errors
from legato.http.routes.embeddings.operations import operations
from legato.http.routes.openai import errors as openai_errors
from legato.http.routes.openai.adapters import AdapterForbidden
from legato.ipc.settings import RouterSettings

_REFERENCE = "#/components/schemas/{name}"
_SECURITY = "api_key"
_JSON = "application/json"
_TOO_LONG = "The request took longer than 60 seconds (--request-timeout)"
# status -> (description, error_type, message)
_ERRORS = {
    400: ("The body is not JSON", "validation", "Failed to parse the request body as JSON: ..."),
    401: ("Missing or invalid API key", "unauthorized", "The API key is not valid"),
    403: (
        "The server has no API keys, and the request is from another machine",
        "unauthorized",
        str(health.LocalOnly()),
    ),
    404: ("Unknown file or adapter", "not_found", "`adapter_id` is unknown: no adapter 'french' is loaded"),
    413: ("The body is too large", "validation", "The request body is larger than the limit of 2000000 bytes"),
    415: ("The body is compressed", "validation", str(CompressedBody("gzip"))),
    422: ("The request is invalid", "validation", "Input validation error: `inputs` cannot be empty"),
    424: ("Generation failed", "generation", "Request failed during generation: ..."),
    429: ("Too many requests; retry later", "overloaded", "Model is overloaded"),
    503: ("The model cannot be reached", "healthcheck", "unhealthy"),
    504: ("A time limit was exceeded", "timeout", _TOO_LONG),
}
# status -> (description, an error that has it)
_OPENAI_ERRORS = {
    400: ("The request is invalid", InvalidRequest("`n` must be >= 1 and <= 8. Given: 9", "n")),
    401: ("Missing or invalid API key", Unauthorized("The API key is not valid")),
    403: ("Not allowed", AdapterForbidden("This API key may not change LoRA adapters")),
    404: ("Unknown model or response", UnknownModel("other")),
    409: (
        "The adapter is already loaded, or being loaded or unloaded",
        AdapterForbidden("an adapter 'french' is already loaded"),
    ),
    413: ("The body is too large", PayloadTooLarge(2_000_000)),
    415: ("The body is compressed", CompressedBody("gzip")),
    422: ("The chat template refused the messages", TemplateError("...")),
    429: ("Too many requests; retry later", Overloaded()),
    500: ("Generation failed", GenerationFailed("...")),
    503: ("The shards are restarting", Unhealthy("the shards were lost: the adapter was not loaded")),
    504: ("A time limit was exceeded", TimedOut(_TOO_LONG)),
}


def document(settings: RouterSettings) -> dict[str, Any]:
    served = operations(settings)
    schemas = _Schemas(served)
    paths: dict[str, dict[str, Any]] = {}
    for operation in served:
        if settings.api_keys and not operation.is_open:
            operation = replace(operation, errors=(*operation.errors, 401))
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, schemas)
    components: dict[str, Any] = {"schemas": schemas.components}
    if settings.api_keys:
        components["securitySchemes"] = {_SECURITY: {"type": "http", "scheme": "bearer"}}
    does = "Text generation" if settings.embedding is None else "Text embeddings"
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Legato",
            "description": f"{does} with {settings.model_id}.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            "version": settings.version,
        },
        "paths": paths,
        "components": components,
    }


class _Schemas:
    """JSON schemas of the structs, and references to them."""

    def __init__(self, served: list[Operation]) -> None:
        types: list[Any] = []
        for operation in served:
            for kind in (operation.request, *(operation.response or {}).values()):
                types += kind if isinstance(kind, tuple) else [kind]
        types = [kind for kind in types if kind is not None] + [ErrorResponse, OpenAIError, AnthropicError]
        self._types = types
        self._schemas, self.components = msgspec.json.schema_components(types, ref_template=_REFERENCE)

    def of(self, kind: Any) -> dict[str, Any]:
        if isinstance(kind, tuple):
            return {"anyOf": [self.of(one) for one in kind]}
        schema: dict[str, Any] = self._schemas[self._types.index(kind)]
        return schema


def _describe(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    name = "_".join(re.findall(r"[\w.-]+", operation.path)) or "root"
    described: dict[str, Any] = {
        "operationId": f"{operation.method}_{name}",
        "summary": operation.summary,
        "responses": {"200": _success(operation, schemas)},
    }
    if operation.description:
        described["description"] = operation.description
    if operation.request is not None:
        content = {"schema": schemas.of(operation.request), "example": operation.example}
        described["requestBody"] = {"required": True, "content": {_JSON: content}}
    if names := re.findall(r"{(\w+)}", operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    describe_error = _openai_error if operation.path.startswith("/v1/") else _native_error
    if operation.path.startswith(anthropic_errors.PREFIX):
        describe_error = _anthropic_error
    if 401 in operation.errors:
        described["security"] = [{_SECURITY: []}]
    for status in operation.errors:
        described["responses"][str(status)] = describe_error(status, schemas)
    return described


def _native_error(status: int, schemas: _Schemas) -> dict[str, Any]:
    description, error_type, message = _ERRORS[status]
    content = {"schema": schemas.of(ErrorResponse), "example": {"error": message, "error_type": error_type}}
    return {"description": description, "content": {_JSON: content}}


def _openai_error(status: int, schemas: _Schemas) -> dict[str, Any]:
    description, error = _OPENAI_ERRORS[status]
    content = {"schema": schemas.of(OpenAIError), "example": msgspec.json.decode(openai_errors.body(error))}
    return {"description": description, "content": {_JSON: content}}


def _anthropic_error(status: int, schemas: _Schemas) -> dict[str, Any]:
    description, error = _OPENAI_ERRORS[429 if status == 529 else status]
    content = {"schema": schemas.of(AnthropicError), "example": msgspec.json.decode(anthropic_errors.body(error))}
    return {"description": description, "content": {_JSON: content}}


def _success(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    if operation.response is None:
        return {"description": "Yes"}
    content = {media_type: {"schema": schemas.of(kind)} for media_type, kind in operation.response.items()}
    return {"description": "The answer", "content": content}
