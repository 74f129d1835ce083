"""The ASGI application: the table of routes, and what all responses have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers import Tokenizer

from legato.api.errors import (
    ClientGone,
    InternalError,
    MethodNotAllowed,
    NotFound,
    RequestError,
    WrongTask,
)
from legato.api.native import Info, TokenizeRequest
from legato.chat.tools.tooling import ChatRenderer
from legato.http.auth import OPEN_PATHS, RequireKey
from legato.http.exchange import DIRECT_SEND, ROUTE, ROUTED, Exchange
from legato.http.inference import Inference
from legato.http.openapi import document
from legato.http.pages.docs import PAGE
from legato.http.pages.routes import PageRoutes
from legato.http.routed import RouteKey
from legato.http.routes.anthropic import errors as anthropic_errors
from legato.http.routes.anthropic.messages import MessageRoutes
from legato.http.routes.embeddings import errors as embedding_errors
from legato.http.routes.embeddings.operations import needed_task
from legato.http.routes.health import HealthRoutes
from legato.http.routes.native import GenerateRoutes
from legato.http.routes.openai import errors as openai_errors
from legato.http.routes.openai.adapters import AdapterRoutes
from legato.http.routes.openai.chat import ChatRoutes
from legato.http.routes.openai.completions import CompletionRoutes
from legato.http.routes.openai.models import ModelRoutes
from legato.http.routes.openai.token_names import TokenNames
from legato.http.routes.platforms.kserve import KServeRoutes
from legato.http.routes.platforms.sagemaker import SageMakerRoutes
from legato.http.routes.platforms.vertex import VertexRoutes
from legato.http.routes.replica import ReplicaStreams, replica_events, replica_state
from legato.http.routes.responses.routes import ResponseRoutes
from legato.http.scheduler import SchedulerClient
from legato.http.telemetry import request_log
from legato.http.telemetry.tracing import TracedRequests
from legato.http.throttle import AcceptThrottle
from legato.ipc.multiplexing import STREAMS_PATH
from legato.ipc.routed import EVENTS_PATH, STATE_PATH
from legato.ipc.settings import EmbeddingSettings, RouterSettings
from legato.scheduling.state import ModelLimits
from legato.telemetry import metrics as prometheus
from legato.telemetry.export import SpanExport
from legato.telemetry.metrics import Metrics
from legato.vision.rules import ImageRules

JSON = "application/json"
# Below this, errors are OpenAI's, but for Anthropic's routes.
OPENAI_PREFIX = "/v1/"
VERTEX = VertexRoutes.vertex.__name__
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)


def create_app(
    scheduler: SchedulerClient,
    tokenizer: Tokenizer,
    settings: RouterSettings,
    metrics: Metrics | None = None,
    chat_template: ChatRenderer | None = None,
    image_rules: ImageRules | None = None,
    first_id: int = 1,
    scrape: Callable[[], Awaitable[bytes]] | None = None,
    spans: SpanExport | None = None,
) -> ASGIApp:
    """The HTTP side as an ASGI application. With `spans`, requests are traced."""
    metrics = Metrics(scheduler.limits) if metrics is None else metrics
    inference = Inference.create(scheduler, tokenizer, settings, metrics, chat_template, image_rules, first_id, scrape)
    app = Starlette(
        routes=_routes(inference),
        middleware=_middleware(settings),
        exception_handlers={
            RequestError: _on_request_error,
            HTTPException: partial(_on_http_exception, settings),
            Exception: _on_bug,
        },
    )
    # TGI has no route with a slash at its end, and a redirect would lose the body of a POST in many clients.
    app.router.redirect_slashes = False
    shortcut = Shortcut(app, None if settings.route_key is None else RouteKey(settings.route_key))
    return shortcut if spans is None else TracedRequests(shortcut, spans)


def _middleware(settings: RouterSettings) -> list[Middleware]:
    """Outermost first. Browsers ask whether they may send a key before they send it."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_allow_origin or ["*"],
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["Content-Type", "Authorization", "X-Api-Key", "Anthropic-Version", "Anthropic-Beta"],
    )
    if not settings.api_keys:
        return [cors]
    open_paths = OPEN_PATHS | ({settings.vertex_health_route} if settings.vertex_health_route else set())
    return [cors, Middleware(RequireKey, keys=settings.api_keys, refuse=_refuse, open_paths=open_paths)]


class Shortcut:
    """Outermost: remembers the server's own `send`, so that tokens do not pass through every layer that follows, tells
    a balancer's requests from others, and lets work in a little at a time."""

    def __init__(self, app: ASGIApp, route_key: RouteKey | None = None) -> None:
        self._app = app
        self._route_key = route_key
        self._throttle = AcceptThrottle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault(DIRECT_SEND, send)
        if self._route_key is not None:
            scope[ROUTED] = self._route_key.read(scope)
        if scope.get("method") == "POST":
            await self._throttle.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            del scope[DIRECT_SEND]  # which refers to the scope: a circle that only the garbage collector would find


class Endpoint:
    """A handler that talks to the server through ASGI itself. Nothing follows when its client hangs up."""

    def __init__(self, handler: Callable[[Exchange], Coroutine[None, None, None]]) -> None:
        self._handler = handler
        self._name = handler.__name__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._name
        exchange = Exchange(scope, receive, send)
        if exchange.routed is not None:
            exchange.routed.enter()
        try:
            # A task of its own, because waking one that waits inside ten layers of framework wakes every layer.
            await asyncio.create_task(self._handler(exchange))
        except ClientGone:
            request_log.dropped(self._name)


def _routes(inference: Inference) -> list[Route]:
    if inference.settings.embedding is not None:
        return _embedding_routes(inference, inference.settings.embedding)
    settings, scheduler = inference.settings, inference.scheduler
    generate, health = GenerateRoutes(inference), HealthRoutes(scheduler, has_keys=bool(settings.api_keys))
    names = TokenNames(inference.tokenizer, inference.vocabulary)
    completions, chat = CompletionRoutes(inference, names), ChatRoutes(inference, names)
    adapters = AdapterRoutes(settings, scheduler)
    messages = MessageRoutes(inference)
    return [
        *_platform_routes(inference, generate, chat, completions, health.health),
        Route("/", Endpoint(generate.compat), methods=["POST"]),
        Route("/generate", Endpoint(generate.generate), methods=["POST"]),
        Route("/generate_stream", Endpoint(generate.generate_stream), methods=["POST"]),
        Route("/v1/chat/completions", Endpoint(chat.chat_completions), methods=["POST"]),
        Route("/v1/messages", Endpoint(messages.messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", Endpoint(messages.count_tokens), methods=["POST"]),
        *_response_routes(ResponseRoutes(inference, names)),
        Route("/v1/completions", Endpoint(completions.completions), methods=["POST"]),
        Route("/v1/load_lora_adapter", Endpoint(adapters.load_adapter), methods=["POST"]),
        Route("/v1/unload_lora_adapter", Endpoint(adapters.unload_adapter), methods=["POST"]),
        Route("/chat_tokenize", Endpoint(chat.chat_tokenize), methods=["POST"]),
        *_shared_routes(inference, health, msgspec.json.encode(_info(settings, scheduler.limits))),
    ]


def _shared_routes(inference: Inference, health: HealthRoutes, info: bytes) -> list[Route]:
    """Those of every server, whatever it does with texts."""
    settings, scheduler = inference.settings, inference.scheduler
    models = ModelRoutes(settings, scheduler)
    openapi = msgspec.json.encode(document(settings))

    async def tokenize(exchange: Exchange) -> None:
        request = await exchange.json(_tokenize_decoder, settings.payload_limit)
        async with inference.concurrency.validating(exchange.body_size, exchange.tenant):
            tokens = await inference.validator.tokenize(request.inputs)
        await exchange.respond(msgspec.json.encode(tokens), {"content-type": JSON})

    async def show_metrics(request: Request) -> Response:
        return Response(await inference.scrape(), media_type=prometheus.CONTENT_TYPE)

    def page(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            return Response(content, media_type=media_type)

        return show

    return [
        Route("/v1/models", models.models),
        Route("/v1/models/{model:path}", models.model),
        Route("/tokenize", Endpoint(tokenize), methods=["POST"]),
        # Nobody can chat with a model that embeds.
        *PageRoutes(health.health, scheduler.observe, "ui" if settings.embedding is None else "docs").routes,
        *(Route(path, health.health) for path in ("/health", "/ping")),
        Route("/livez", health.live),
        Route("/readyz", health.ready),
        Route("/startupz", health.startup),
        Route("/drain", Endpoint(health.drain), methods=["POST"]),
        Route(STATE_PATH, replica_state(scheduler, settings)),
        Route(EVENTS_PATH, replica_events(scheduler)),
        Route(STREAMS_PATH, ReplicaStreams()),
        Route("/info", page(info, JSON)),
        Route("/metrics", show_metrics),
        Route("/docs", page(PAGE.encode(), "text/html")),
        Route("/api-doc/openapi.json", page(openapi, JSON)),
    ]


def _embedding_routes(inference: Inference, settings: EmbeddingSettings) -> list[Route]:
    from legato.http.routes.embeddings.info import server_info
    from legato.http.routes.embeddings.routes import EmbeddingRoutes  # brings in numpy

    routes = EmbeddingRoutes(inference, settings)
    health = HealthRoutes(inference.scheduler, has_keys=bool(inference.settings.api_keys))
    info = server_info(inference.settings, settings, inference.scheduler.limits)
    return [
        Route("/", Endpoint(routes.main), methods=["POST"]),
        Route("/v1/embeddings", Endpoint(routes.embeddings), methods=["POST"]),
        Route("/embed", Endpoint(routes.embed), methods=["POST"]),
        Route("/rerank", Endpoint(routes.rerank), methods=["POST"]),
        Route("/predict", Endpoint(routes.predict), methods=["POST"]),
        *_shared_routes(inference, health, msgspec.json.encode(info)),
    ]


def _response_routes(responses: ResponseRoutes) -> list[Route]:
    one = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", Endpoint(responses.responses), methods=["POST"]),
        Route("/v1/responses/input_tokens", Endpoint(responses.input_tokens), methods=["POST"]),
        Route(one, Endpoint(responses.response), methods=["GET"]),
        Route(one, Endpoint(responses.delete_response), methods=["DELETE"]),
        Route(f"{one}/cancel", Endpoint(responses.cancel_response), methods=["POST"]),
        Route(f"{one}/input_items", Endpoint(responses.response_input_items), methods=["GET"]),
    ]


def _platform_routes(
    inference: Inference,
    generate: GenerateRoutes,
    chat: ChatRoutes,
    completions: CompletionRoutes,
    health: Callable[[Request], Awaitable[Response]],
) -> list[Route]:
    """The paths that Vertex AI chooses come first: they take precedence over ours."""
    settings = inference.settings
    vertex = Endpoint(VertexRoutes(settings, generate, chat).vertex)
    invocations = Endpoint(SageMakerRoutes(settings, generate, chat, completions).invocations)
    kserve = KServeRoutes(inference, generate)
    model = "/v2/models/{name}/versions/{version}"
    routes = [
        Route("/vertex", vertex, methods=["POST"]),
        Route("/invocations", invocations, methods=["POST"]),
        Route("/v2", kserve.server),
        Route("/v2/health/live", kserve.live),
        Route("/v2/health/ready", kserve.ready),
        Route(model, kserve.model),
        Route(f"{model}/ready", kserve.model_ready),
        Route(f"{model}/infer", Endpoint(kserve.infer), methods=["POST"]),
    ]
    if settings.vertex_predict_route is not None:
        routes.insert(0, Route(settings.vertex_predict_route, vertex, methods=["POST"]))
    if settings.vertex_health_route is not None:
        routes.insert(0, Route(settings.vertex_health_route, health))
    return routes


def _info(settings: RouterSettings, limits: ModelLimits) -> Info:
    return Info(
        model_id=settings.model_id,
        model_sha=settings.model_sha,
        model_pipeline_tag=settings.model_pipeline_tag,
        max_concurrent_requests=settings.max_concurrent_requests,
        max_best_of=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=settings.validation_workers,
        max_client_batch_size=settings.max_client_batch_size,
        router="text-generation-router",
        version=settings.version,
        sha=settings.sha,
        docker_label=settings.docker_label,
    )


# ---- errors, as the clients of each API expect them ----------------------------------------------------------------


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _refuse(request.url.path, error, error.headers, request.scope.get(ROUTE, ""))


def _refuse(path: str, error: RequestError, headers: Mapping[str, str] | None, route: str = "") -> Response:
    if route == VERTEX:  # whose path the platform chooses, often below /v1
        status, body = error.status, error.body
    elif path.startswith(anthropic_errors.PREFIX):
        status, body = anthropic_errors.status(error), anthropic_errors.body(error)
    elif path.startswith(OPENAI_PREFIX):
        status, body = openai_errors.status(error), openai_errors.body(error)
    elif path in embedding_errors.TEI_PATHS:
        status, body = embedding_errors.status(error), embedding_errors.body(error)
    else:
        status, body = error.status, error.body
    request_log.failed(route, error, status)
    return Response(body, status, headers, JSON)


async def _on_http_exception(settings: RouterSettings, request: Request, error: Exception) -> Response:
    """What the framework itself refuses: an unknown path, or a known one with another method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=error.headers)
    if error.status_code == 405:
        refusal: RequestError = MethodNotAllowed(f"{request.url.path} does not take {request.method}")
    elif (task := needed_task(request.url.path, settings)) is not None:
        refusal = WrongTask(request.url.path, task)
    else:
        refusal = NotFound(f"There is no route {request.url.path}")
    return _refuse(request.url.path, refusal, error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The server logs it; the client learns that it was not their fault."""
    return _refuse(request.url.path, InternalError(), None, request.scope.get(ROUTE, ""))
