"""The OpenAPI document: the routes are listed here, their schemas come from the structs that parse and answer them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from legato.api.dashboard import DashboardData
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
from legato.api.native import (
    CompatGenerateRequest,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Info,
    SimpleToken,
    StreamResponse,
    TokenizeRequest,
)
from legato.api.openai.requests import ChatRequest, CompletionRequest, LoadAdapterRequest, UnloadAdapterRequest
from legato.api.openai.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatTokenizeResponse,
    Completion,
    CompletionChunk,
    ModelList,
    ModelObject,
    OpenAIError,
)
from legato.chat.template import TemplateError
from legato.http.auth import OPEN_PATHS, Unauthorized
from legato.http.pages.routes import MEDIA_TYPES
from legato.http.routes import health
from legato.http.routes.openai import errors as openai_errors
from legato.http.routes.openai.adapters import AdapterChange, AdapterForbidden
from legato.http.routes.platforms import kserve
from legato.http.routes.platforms.vertex import VertexRequest, VertexResponse
from legato.ipc.settings import RouterSettings

_REFERENCE = "#/components/schemas/{name}"
_SECURITY = "api_key"
_JSON, _EVENTS = "application/json", "text/event-stream"
# How a stream of OpenAI's API ends. All other events are JSON.
_Done = Literal["[DONE]"]
_TOO_LONG = "The request took longer than 60 seconds (--request-timeout)"
# status -> (description, error_type, message)
_ERRORS = {
    400: ("The body is not JSON", "validation", "Failed to parse the request body as JSON: ..."),
    401: ("No API key, or a wrong one", "unauthorized", "The API key is not valid"),
    403: ("The server has no API keys, and another machine asks", "unauthorized", str(health.LocalOnly())),
    404: ("No such file or adapter", "not_found", "`adapter_id` is unknown: no adapter 'french' is loaded"),
    413: ("The body is too large", "validation", "The request body is larger than the limit of 2000000 bytes"),
    415: ("The body is compressed", "validation", str(CompressedBody("gzip"))),
    422: ("The request cannot be served", "validation", "Input validation error: `inputs` cannot be empty"),
    424: ("Generation failed", "generation", "Request failed during generation: ..."),
    429: ("Too many requests; try again", "overloaded", "Model is overloaded"),
    503: ("The model cannot be reached", "healthcheck", "unhealthy"),
    504: ("Took longer than the server allows", "timeout", _TOO_LONG),
}
_BODY_ERRORS = (400, 413, 415, 422)
_GENERATION_ERRORS = (*_BODY_ERRORS, 404, 424, 429, 504)
# status -> (description, an error that has it)
_OPENAI_ERRORS = {
    400: ("The request cannot be served", InvalidRequest("`n` must be >= 1 and <= 8. Given: 9", "n")),
    401: ("No API key, or a wrong one", Unauthorized("The API key is not valid")),
    403: ("Not allowed", AdapterForbidden("This API key may not change LoRA adapters")),
    404: ("No such model", UnknownModel("other")),
    409: ("The adapter is loaded already, or changing", AdapterForbidden("an adapter 'french' is loaded already")),
    413: ("The body is too large", PayloadTooLarge(2_000_000)),
    415: ("The body is compressed", CompressedBody("gzip")),
    422: ("The chat template refuses", TemplateError("...")),
    429: ("Too many requests; try again", Overloaded()),
    500: ("Generation failed", GenerationFailed("...")),
    503: ("The shards are restarting", Unhealthy("the shards were lost: the adapter was not loaded")),
    504: ("Took longer than the server allows", TimedOut(_TOO_LONG)),
}


@dataclass(frozen=True)
class Operation:
    """One line of the table of routes."""

    method: str
    path: str
    summary: str
    description: str = ""
    # A struct, or a tuple of those that are taken.
    request: Any = None
    example: dict[str, Any] | None = None
    # Media type -> type of the answer with status 200, or a tuple of those that it may have; of events, what each of
    # them holds. None: no body.
    response: dict[str, Any] | None = None
    errors: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether it needs no key where others do."""
        return self.method == "get" and self.path in OPEN_PATHS


_PARAMETERS = {"max_new_tokens": 20, "details": True}
_GENERATE_EXAMPLE = {"inputs": "The capital of France is", "parameters": _PARAMETERS}
_KSERVE_MODEL = "/v2/models/{name}/versions/{version}"
_CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20}

OPERATIONS = [
    Operation(
        "post",
        "/generate",
        "Generate text",
        "Answers when the text is complete. Timings are in the x-* headers, in milliseconds.",
        GenerateRequest,
        _GENERATE_EXAMPLE,
        {_JSON: GenerateResponse},
        _GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/generate_stream",
        "Generate text and stream its tokens",
        "Server-sent events, one per token; the last one has the whole text. Errors after the body was parsed come as "
        "an event too, with status 200, except when the server is overloaded. `best_of` and `decoder_input_details` "
        "need the whole answer and are refused here.",
        GenerateRequest,
        _GENERATE_EXAMPLE,
        {_EVENTS: (StreamResponse, ErrorResponse)},
        _GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/",
        "Generate text, streamed or not",
        "With `stream` like /generate_stream, otherwise a list with the answer of /generate. `return_full_text` is "
        "true unless the model's pipeline tag says that it does something else than text generation.",
        CompatGenerateRequest,
        {**_GENERATE_EXAMPLE, "stream": False},
        {_JSON: list[GenerateResponse], _EVENTS: (StreamResponse, ErrorResponse)},
        _GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/tokenize",
        "Tokenize text",
        "Every token with its place in the text, in bytes.",
        TokenizeRequest,
        {"inputs": "The capital of France is"},
        {_JSON: list[SimpleToken]},
        _BODY_ERRORS,
    ),
    Operation(
        "post",
        "/chat_tokenize",
        "Tokenize a conversation",
        "What the chat template makes of the messages, and the tokens of that.",
        ChatRequest,
        _CHAT_EXAMPLE,
        {_JSON: ChatTokenizeResponse},
        _BODY_ERRORS,
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Chat, as in OpenAI's API",
        "With `stream` server-sent events that end with [DONE]. What is wrong with a request is said before a stream "
        "begins; an error after that is its last event.",
        ChatRequest,
        _CHAT_EXAMPLE,
        {_JSON: ChatCompletion, _EVENTS: (ChatCompletionChunk, OpenAIError, _Done)},
        (400, 404, 413, 415, 422, 429, 500, 504),
    ),
    Operation(
        "post",
        "/v1/completions",
        "Complete text, as in OpenAI's API",
        "Several prompts are answered together; with `n` answers each, choice i*n+j is the jth to the ith prompt.",
        CompletionRequest,
        {"prompt": "The capital of France is", "max_tokens": 20},
        {_JSON: Completion, _EVENTS: (CompletionChunk, OpenAIError, _Done)},
        (400, 404, 413, 415, 429, 500, 504),
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "Load a LoRA adapter",
        "With --lora-allow-runtime. Answers when requests may name the adapter; others do not wait.",
        LoadAdapterRequest,
        {"lora_name": "french", "lora_path": "/srv/adapters/french"},
        {_JSON: AdapterChange},
        (400, 403, 409, 413, 415, 422, 503),
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        "Unload a LoRA adapter",
        "New requests are refused at once. Answers when the last one that uses it has ended.",
        UnloadAdapterRequest,
        {"lora_name": "french"},
        {_JSON: AdapterChange},
        (400, 403, 404, 409, 413, 415),
    ),
    Operation("get", "/v1/models", "The model and its LoRA adapters, as in OpenAI's API", response={_JSON: ModelList}),
    Operation("get", "/v1/models/{model}", "One model by its name", response={_JSON: ModelObject}, errors=(404,)),
    Operation(
        "post",
        "/invocations",
        "Generate text on SageMaker",
        "The request of /, of /v1/chat/completions or of /v1/completions, told apart by `inputs`, `messages` and "
        "`prompt`, and answered like there.",
        (CompatGenerateRequest, ChatRequest, CompletionRequest),
        _GENERATE_EXAMPLE,
        {
            _JSON: (list[GenerateResponse], ChatCompletion, Completion),
            _EVENTS: (StreamResponse, ErrorResponse, ChatCompletionChunk, CompletionChunk, OpenAIError, _Done),
        },
        _GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/vertex",
        "Generate texts on Vertex AI",
        "Instances are requests of /generate or of /v1/chat/completions. One that fails fails all of them.",
        VertexRequest,
        {"instances": [_GENERATE_EXAMPLE, _CHAT_EXAMPLE]},
        {_JSON: VertexResponse},
        _GENERATION_ERRORS,
    ),
    Operation("get", "/v2", "The server, as in KServe's protocol", response={_JSON: kserve.ServerMetadata}),
    Operation("get", "/v2/health/live", "Does the server answer?", response={_JSON: kserve.Live}),
    Operation(
        "get", "/v2/health/ready", "Health", "Can the model compute?", response={_JSON: kserve.Ready}, errors=(503,)
    ),
    Operation("get", _KSERVE_MODEL, "The model, as in KServe's protocol", response={_JSON: kserve.ModelMetadata}),
    Operation(
        "get",
        f"{_KSERVE_MODEL}/ready",
        "Health",
        "Can the model compute?",
        response={_JSON: kserve.ModelReady},
        errors=(503,),
    ),
    Operation(
        "post",
        f"{_KSERVE_MODEL}/infer",
        "Generate texts, as in KServe's protocol",
        "A prompt is a tensor of UTF-8 bytes, or a string in one. The answers come in the form of the prompts.",
        kserve.InferRequest,
        {"id": "1", "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["The capital of"]}]},
        {_JSON: kserve.InferResponse},
        _GENERATION_ERRORS,
    ),
    Operation("get", "/", "Health", "Can the model compute? Browsers are sent to /ui.", errors=(503,)),
    Operation("get", "/health", "Health", "Can the model compute?", errors=(503,)),
    Operation("get", "/ping", "Health", "Can the model compute?", errors=(503,)),
    Operation(
        "get",
        "/livez",
        "Liveness",
        "Do steps advance? Also yes while shards are replaced, and while the server is busy.",
        response={_JSON: health.Liveness},
        errors=(503,),
    ),
    Operation(
        "get",
        "/readyz",
        "Readiness",
        "Can requests be admitted? Not while shards are replaced, and not when the server drains.",
        response={_JSON: health.Readiness},
        errors=(503,),
    ),
    Operation("get", "/startupz", "Start-up", "Is the model loaded?", response={_JSON: health.Startup}, errors=(503,)),
    Operation(
        "post",
        "/drain",
        "Admit no more requests",
        "Running requests finish; new ones get 503. The server stays up until it is stopped. Without API keys only"
        " programs on the server's machine may ask for it.",
        response={_JSON: health.DrainResponse},
        errors=(403,),
    ),
    Operation("get", "/info", "The model and the limits of this server", response={_JSON: Info}),
    Operation("get", "/metrics", "Metrics in Prometheus' text format", response={"text/plain": str}),
    Operation("get", "/docs", "This documentation as a page", response={"text/html": str}),
    Operation("get", "/ui", "A page to try the model: chats and completions", response={"text/html": str}),
    Operation("get", "/dashboard", "A page that shows the batch as it runs", response={"text/html": str}),
    Operation(
        "get",
        "/dashboard/data",
        "The batch as it runs",
        "Rows, queue, KV blocks, recent steps and counters. Numbers only.",
        response={_JSON: DashboardData},
    ),
    Operation(
        "get",
        "/pages/{name}",
        "A script, style sheet or icon of the pages",
        response=dict.fromkeys(MEDIA_TYPES.values(), str),
        errors=(404,),
    ),
    Operation("get", "/api-doc/openapi.json", "This documentation", response={_JSON: dict}),
]


def document(settings: RouterSettings) -> dict[str, Any]:
    schemas = _Schemas()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        if settings.api_keys and not operation.is_open:
            operation = replace(operation, errors=(*operation.errors, 401))
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, schemas)
    components: dict[str, Any] = {"schemas": schemas.components}
    if settings.api_keys:
        components["securitySchemes"] = {_SECURITY: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Legato",
            "description": f"Text generation with {settings.model_id}.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            "version": settings.version,
        },
        "paths": paths,
        "components": components,
    }


class _Schemas:
    """JSON schemas of the structs, and references to them."""

    def __init__(self) -> None:
        types: list[Any] = []
        for operation in OPERATIONS:
            for kind in (operation.request, *(operation.response or {}).values()):
                types += kind if isinstance(kind, tuple) else [kind]
        types = [kind for kind in types if kind is not None] + [ErrorResponse, OpenAIError]
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


def _success(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    if operation.response is None:
        return {"description": "Yes"}
    content = {media_type: {"schema": schemas.of(kind)} for media_type, kind in operation.response.items()}
    return {"description": "The answer", "content": content}
