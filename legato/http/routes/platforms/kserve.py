"""KServe's Open Inference Protocol, version 2: texts as tensors of bytes.

There is one model, so any name and version mean it. A prompt is a list of its UTF-8 bytes, as TGI took them, or a list
of strings, as the protocol writes tensors of type BYTES; the answer comes in the form of the question.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from legato.api.errors import InvalidRequest, Unhealthy
from legato.api.native import GenerateParameters, GenerateRequest
from legato.http.exchange import Exchange
from legato.http.inference import Inference
from legato.http.routes.native import GenerateRoutes
from legato.http.routes.platforms.exchanges import Ask, answer_all, text_of

JSON = "application/json"
# What TGI calls itself and its parts in this protocol.
TGI_NAME = "text-generation-inference"
SERVER_EXTENSIONS, MODEL_EXTENSIONS = ["health", "models", "metrics"], ["infer", "ready"]
Byte = Annotated[int, Meta(ge=0, le=255)]


class Tensor(Struct, kw_only=True, frozen=True):
    name: str
    data: Annotated[list[Byte | str], Meta(description="One prompt as its UTF-8 bytes, or prompts as strings.")]
    shape: Annotated[list[int] | None, Meta(description="Accepted and ignored; `data` determines the shape.")] = None
    datatype: Annotated[str | None, Meta(description="Accepted and ignored.", examples=["BYTES"])] = None


class OutputName(Struct, kw_only=True, frozen=True):
    name: str


class InferRequest(Struct, kw_only=True, frozen=True):
    id: Annotated[str | None, Meta(description="Returned in the response.")] = None
    parameters: GenerateParameters | None = None
    inputs: Annotated[list[Tensor], Meta(description="Prompts.", extra_json_schema={"minItems": 1})]
    outputs: Annotated[list[OutputName] | None, Meta(description="Names of the outputs; if given, one per input.")] = (
        None
    )


class OutputTensor(Struct, kw_only=True):
    name: str
    shape: list[int]
    datatype: str = "BYTES"
    data: list[int | str]


class InferResponse(Struct, kw_only=True):
    id: str
    model_name: str
    outputs: list[OutputTensor]


class ServerMetadata(Struct, kw_only=True):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Struct, kw_only=True):
    name: str
    datatype: str = "BYTES"
    shape: list[int]


class ModelMetadata(Struct, kw_only=True):
    """The protocol's fields, and `version` and `extensions`, which TGI has instead."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    version: str
    extensions: list[str]


class Live(Struct, kw_only=True):
    live: bool


class Ready(Struct, kw_only=True):
    """`live` is what TGI calls it."""

    ready: bool
    live: bool


class ModelReady(Struct, kw_only=True):
    name: str
    ready: bool
    live: bool


_decoder = msgspec.json.Decoder(InferRequest)


class KServeRoutes:
    def __init__(self, inference: Inference, generate: GenerateRoutes) -> None:
        self._scheduler = inference.scheduler
        self._settings = inference.settings
        self._generate = generate.generate

    # ---- about the server and its model ----------------------------------------------------------------------------

    async def server(self, request: Request) -> Response:
        return _json(ServerMetadata(name=TGI_NAME, version=self._settings.version, extensions=SERVER_EXTENSIONS))

    async def live(self, request: Request) -> Response:
        """The router answers; whether the model does is another question."""
        return _json(Live(live=True))

    async def ready(self, request: Request) -> Response:
        self._check_ready()
        return _json(Ready(ready=True, live=True))

    async def model(self, request: Request) -> Response:
        name, version = request.path_params["name"], request.path_params["version"]
        texts = [TensorMetadata(name="text", shape=[-1])]
        return _json(
            ModelMetadata(
                name=name,
                versions=[version],
                platform="legato",
                inputs=texts,
                outputs=texts,
                version=version,
                extensions=MODEL_EXTENSIONS,
            )
        )

    async def model_ready(self, request: Request) -> Response:
        self._check_ready()
        return _json(ModelReady(name=request.path_params["name"], ready=True, live=True))

    def _check_ready(self) -> None:
        if not self._scheduler.state.ready:
            raise Unhealthy

    # ---- inference -------------------------------------------------------------------------------------------------

    async def infer(self, exchange: Exchange) -> None:
        request = await exchange.json(_decoder, self._settings.payload_limit)
        names = _output_names(request)
        prompts = [_prompts(number, tensor) for number, tensor in enumerate(request.inputs)]
        asks = [self._ask(number, text, request) for number, texts in enumerate(prompts) for text in texts]
        answers = iter(await answer_all(exchange, asks, self._settings.max_concurrent_requests))
        response = InferResponse(
            id=request.id or "",
            model_name=self._settings.model_id,
            outputs=[_output(name, tensor, answers) for name, tensor in zip(names, request.inputs, strict=True)],
        )
        await exchange.respond(msgspec.json.encode(response), {"content-type": JSON})

    def _ask(self, number: int, text: str, request: InferRequest) -> Ask:
        body = msgspec.json.encode(GenerateRequest(inputs=text, parameters=request.parameters))
        return Ask(f"inputs[{number}]", body, self._generate)


def _output_names(request: InferRequest) -> list[str]:
    """One for each input."""
    if not request.inputs:
        raise InvalidRequest("`inputs` cannot be empty")
    if request.outputs is None:
        return [tensor.name for tensor in request.inputs]
    if len(request.outputs) != len(request.inputs):
        raise InvalidRequest(f"there are {len(request.inputs)} `inputs` and {len(request.outputs)} `outputs`")
    return [output.name for output in request.outputs]


def _prompts(number: int, tensor: Tensor) -> list[str]:
    strings = [element for element in tensor.data if isinstance(element, str)]
    if not tensor.data or 0 < len(strings) < len(tensor.data):
        raise InvalidRequest(f"inputs[{number}]: `data` must be the bytes of one text, or strings")
    if strings:
        return strings
    try:
        return [bytes(tensor.data).decode()]  # type: ignore[arg-type]  # no strings, so numbers
    except UnicodeDecodeError:
        raise InvalidRequest(f"inputs[{number}]: `data` is not UTF-8") from None


def _output(name: str, tensor: Tensor, answers: Iterator[bytes]) -> OutputTensor:
    """The next answers, one for each prompt of the tensor."""
    if isinstance(tensor.data[0], str):
        texts: list[int | str] = [text_of(next(answers)) for _ in tensor.data]
        return OutputTensor(name=name, shape=[len(texts)], data=texts)
    data = text_of(next(answers)).encode()
    return OutputTensor(name=name, shape=[1, len(data)], data=list(data))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
