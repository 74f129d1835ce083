"""The table of routes for the OpenAPI document: request, response and errors of each route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from legato.api.anthropic.requests import CountTokensRequest, MessagesRequest
from legato.api.anthropic.responses import AssistantMessage, MessageEvent, TokenCount
from legato.api.dashboard import DashboardData
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
from legato.api.responses.events import AnyResponseEvent
from legato.api.responses.items import DeletedResponse, InputItemList, InputTokenCount, ResponseObject
from legato.api.responses.requests import ResponsesRequest
from legato.http.auth import OPEN_PATHS
from legato.http.pages.routes import MEDIA_TYPES
from legato.http.routes import health
from legato.http.routes.openai.adapters import AdapterChange
from legato.http.routes.platforms import kserve
from legato.http.routes.platforms.vertex import VertexRequest, VertexResponse
from legato.ipc.kv_events import KvEventPage
from legato.ipc.routed import EVENTS_PATH, STATE_PATH, ReplicaState

_JSON, _EVENTS = "application/json", "text/event-stream"
# How a stream of OpenAI's API ends. All other events are JSON.
_Done = Literal["[DONE]"]
_BODY_ERRORS = (400, 413, 415, 422)
_GENERATION_ERRORS = (*_BODY_ERRORS, 404, 424, 429, 504)
_OPENAI_ERRORS = (400, 404, 413, 415, 422, 429, 500, 504)
_ANTHROPIC_ERRORS = (400, 404, 413, 415, 500, 504, 529)


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

_MESSAGES_EXAMPLE = {"model": "any", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
_RESPONSE = "/v1/responses/{response_id}"

OPERATIONS = [
    Operation(
        "post",
        "/generate",
        "Generate text",
        "Responds when generation is complete. The x-* headers have the times, in milliseconds.",
        GenerateRequest,
        _GENERATE_EXAMPLE,
        {_JSON: GenerateResponse},
        _GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/generate_stream",
        "Generate text and stream its tokens",
        "Server-sent events, one per token; the last one has the whole text. Errors after the body was parsed are"
        " sent as an event with status 200, except when the server is overloaded (429). `best_of` and"
        " `decoder_input_details` are refused here.",
        GenerateRequest,
        _GENERATE_EXAMPLE,
        {_EVENTS: (StreamResponse, ErrorResponse)},
        _GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/",
        "Generate text, streamed or not",
        "With `stream`, the same as /generate_stream; otherwise a list with the response of /generate."
        " `return_full_text` defaults to true if the model's pipeline tag is text generation.",
        CompatGenerateRequest,
        {**_GENERATE_EXAMPLE, "stream": False},
        {_JSON: list[GenerateResponse], _EVENTS: (StreamResponse, ErrorResponse)},
        _GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/tokenize",
        "Tokenize text",
        "Returns every token with its position in the text, in bytes.",
        TokenizeRequest,
        {"inputs": "The capital of France is"},
        {_JSON: list[SimpleToken]},
        _BODY_ERRORS,
    ),
    Operation(
        "post",
        "/chat_tokenize",
        "Tokenize a conversation",
        "Returns the text that the chat template renders from the messages, and its tokens.",
        ChatRequest,
        _CHAT_EXAMPLE,
        {_JSON: ChatTokenizeResponse},
        _BODY_ERRORS,
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Chat, as in OpenAI's API",
        "With `stream`, server-sent events that end with [DONE]. Invalid requests are refused with an error status"
        " before the stream begins; a later error is the last event.",
        ChatRequest,
        _CHAT_EXAMPLE,
        {_JSON: ChatCompletion, _EVENTS: (ChatCompletionChunk, OpenAIError, _Done)},
        _OPENAI_ERRORS,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Complete text, as in OpenAI's API",
        "Several prompts are processed together; with `n` choices each, choice i*n+j is the jth choice of the ith"
        " prompt.",
        CompletionRequest,
        {"prompt": "The capital of France is", "max_tokens": 20},
        {_JSON: Completion, _EVENTS: (CompletionChunk, OpenAIError, _Done)},
        (400, 404, 413, 415, 429, 500, 504),
    ),
    Operation(
        "post",
        "/v1/responses",
        "Create a response, as in OpenAI's API",
        "With `stream`, server-sent events named by their type; the last one is `response.completed`,"
        " `response.incomplete` or `response.failed`. A response is stored unless `store` is false.",
        ResponsesRequest,
        {"input": "What is the capital of France?", "max_output_tokens": 20},
        {_JSON: ResponseObject, _EVENTS: (AnyResponseEvent,)},
        _OPENAI_ERRORS,
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the prompt tokens of a response",
        "",
        ResponsesRequest,
        {"input": "What is the capital of France?"},
        {_JSON: InputTokenCount},
        _OPENAI_ERRORS,
    ),
    Operation(
        "get",
        _RESPONSE,
        "Get a stored response",
        "With `?stream=true`, returns the events of a response that was created with `background` and `stream`, from"
        " number `starting_after` + 1 on if that is given.",
        response={_JSON: ResponseObject, _EVENTS: (AnyResponseEvent,)},
        errors=(400, 404),
    ),
    Operation(
        "delete",
        _RESPONSE,
        "Delete a stored response",
        "A response that is being generated is cancelled.",
        response={_JSON: DeletedResponse},
        errors=(404,),
    ),
    Operation(
        "post",
        f"{_RESPONSE}/cancel",
        "Cancel a background response",
        "A complete response does not change.",
        response={_JSON: ResponseObject},
        errors=(400, 404),
    ),
    Operation(
        "get",
        f"{_RESPONSE}/input_items",
        "Get the input items of a stored response",
        response={_JSON: InputItemList},
        errors=(404,),
    ),
    Operation(
        "post",
        "/v1/messages",
        "Create a message, as in Anthropic's API",
        "With `stream`, server-sent events named by their type, from `message_start` to `message_stop`, with `ping`"
        " in between; a stream that fails ends with `error`.",
        MessagesRequest,
        _MESSAGES_EXAMPLE | {"max_tokens": 20},
        {_JSON: AssistantMessage, _EVENTS: (MessageEvent,)},
        _ANTHROPIC_ERRORS,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a prompt, as in Anthropic's API",
        "",
        CountTokensRequest,
        _MESSAGES_EXAMPLE,
        {_JSON: TokenCount},
        _ANTHROPIC_ERRORS,
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "Load a LoRA adapter",
        "Needs --lora-allow-runtime. Responds when requests can use the adapter; other requests are not delayed.",
        LoadAdapterRequest,
        {"lora_name": "french", "lora_path": "/srv/adapters/french"},
        {_JSON: AdapterChange},
        (400, 403, 409, 413, 415, 422, 503),
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        "Unload a LoRA adapter",
        "New requests for the adapter are refused at once. Responds when the last request that uses it has ended.",
        UnloadAdapterRequest,
        {"lora_name": "french"},
        {_JSON: AdapterChange},
        (400, 403, 404, 409, 413, 415),
    ),
    Operation(
        "get", "/v1/models", "List the model and its LoRA adapters, as in OpenAI's API", response={_JSON: ModelList}
    ),
    Operation("get", "/v1/models/{model}", "Get a model by name", response={_JSON: ModelObject}, errors=(404,)),
    Operation(
        "post",
        "/invocations",
        "Generate text on SageMaker",
        "Accepts the requests of /, /v1/chat/completions and /v1/completions, distinguished by `inputs`, `messages`"
        " and `prompt`, with the same responses.",
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
        "Generate text on Vertex AI",
        "Instances are requests of /generate or /v1/chat/completions. If one fails, the whole request fails with its"
        " status and message.",
        VertexRequest,
        {"instances": [_GENERATE_EXAMPLE, _CHAT_EXAMPLE]},
        {_JSON: VertexResponse},
        _GENERATION_ERRORS,
    ),
    Operation("get", "/v2", "Server metadata, as in KServe's protocol", response={_JSON: kserve.ServerMetadata}),
    Operation("get", "/v2/health/live", "Liveness, as in KServe's protocol", response={_JSON: kserve.Live}),
    Operation(
        "get",
        "/v2/health/ready",
        "Health",
        "200 while the model is healthy.",
        response={_JSON: kserve.Ready},
        errors=(503,),
    ),
    Operation("get", _KSERVE_MODEL, "Model metadata, as in KServe's protocol", response={_JSON: kserve.ModelMetadata}),
    Operation(
        "get",
        f"{_KSERVE_MODEL}/ready",
        "Health",
        "200 while the model is healthy.",
        response={_JSON: kserve.ModelReady},
        errors=(503,),
    ),
    Operation(
        "post",
        f"{_KSERVE_MODEL}/infer",
        "Generate text, as in KServe's protocol",
        "A prompt is a tensor of UTF-8 bytes, or a string in a tensor. Outputs have the form of the prompts.",
        kserve.InferRequest,
        {"id": "1", "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["The capital of"]}]},
        {_JSON: kserve.InferResponse},
        _GENERATION_ERRORS,
    ),
    Operation("get", "/", "Health", "200 while the model is healthy. Browsers are redirected to /ui.", errors=(503,)),
    Operation("get", "/health", "Health", "200 while the model is healthy.", errors=(503,)),
    Operation("get", "/ping", "Health", "200 while the model is healthy.", errors=(503,)),
    Operation(
        "get",
        "/livez",
        "Liveness",
        "200 while steps advance, and while shards are replaced.",
        response={_JSON: health.Liveness},
        errors=(503,),
    ),
    Operation(
        "get",
        "/readyz",
        "Readiness",
        "200 while requests can be admitted; 503 while shards are replaced and while the server drains.",
        response={_JSON: health.Readiness},
        errors=(503,),
    ),
    Operation(
        "get", "/startupz", "Start-up", "200 when the model is loaded.", response={_JSON: health.Startup}, errors=(503,)
    ),
    Operation(
        "post",
        "/drain",
        "Drain the server",
        "Running requests finish; new ones get 503. The process keeps running until it is stopped. Without API keys,"
        " only programs on the server's machine may call this route.",
        response={_JSON: health.DrainResponse},
        errors=(403,),
    ),
    Operation(
        "get",
        STATE_PATH,
        "Load of this server, for a balancer",
        "Whether requests can be admitted, how many are running and queued, and how many KV cache blocks are free.",
        response={_JSON: ReplicaState},
    ),
    Operation(
        "get",
        EVENTS_PATH,
        "Events of the prefix cache",
        "Needs `--kv-events` and the route key. `?after=NUMBER` returns the events after that number of an earlier"
        " response; without it, or if the number is too old, the response is the whole content of the cache.",
        response={_JSON: KvEventPage},
        errors=(403, 404, 422),
    ),
    Operation("get", "/info", "Model and limits of this server", response={_JSON: Info}),
    Operation("get", "/metrics", "Metrics in Prometheus' text format", response={"text/plain": str}),
    Operation("get", "/docs", "This reference as a web page", response={"text/html": str}),
    Operation("get", "/ui", "Web page to try the model: chats and completions", response={"text/html": str}),
    Operation("get", "/dashboard", "Web page that shows the running batch", response={"text/html": str}),
    Operation(
        "get",
        "/dashboard/data",
        "Data of the running batch",
        "Rows, queue, KV blocks, recent steps and counters; no text.",
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
