"""SageMaker, Vertex AI and KServe."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from legato.api.errors import GenerationFailed
from legato.common.errors import OptionError
from legato.common.frontend import vertex_port
from legato.router.cli import vertex_route
from legato.scheduling.state import GenerationRequest, Output
from tests.generation import parameters_of
from tests.http.asgi import Answer, Call, FakeBackend, app_for, get, outputs_of, post, until
from tests.http.routes.openai.fakes import HI, Server, chunks

MODEL = "/v2/models/any/versions/1"
INFER = f"{MODEL}/infer"


def ask(path: str, body: Any, backend: FakeBackend | None = None, **settings: Any) -> Answer:
    return Server(backend or FakeBackend(), settings=settings).ask(path, body)


def error_of(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json()["error"]


# ---- SageMaker -------------------------------------------------------------------------------------------------------


def test_invocations_with_inputs_is_the_native_request() -> None:
    body = {"inputs": "hi", "parameters": {"return_full_text": False}}
    assert ask("/invocations", body).json() == [{"generated_text": "hello world"}]


def test_invocations_with_messages_is_a_chat() -> None:
    assert ask("/invocations", {"messages": HI}).json()["choices"][0]["message"]["content"] == "hello world"


def test_invocations_with_prompt_is_a_completion() -> None:
    answer = ask("/invocations", {"prompt": "hi", "inputs": None}).json()
    assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", "hello world")


def test_invocations_streams() -> None:
    assert ask("/invocations", {"inputs": "hi", "stream": True}).events()[-1]["generated_text"] == "hihello world"
    assert len(chunks(ask("/invocations", {"messages": HI, "stream": True}))) > 2


def test_inputs_come_before_messages_and_messages_before_prompt() -> None:
    everything = {"prompt": "a", "messages": HI, "inputs": "b"}
    assert isinstance(ask("/invocations", everything).json(), list)
    del everything["inputs"]
    assert ask("/invocations", everything).json()["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 422, "object"),
        (b"{}", 422, "`inputs`, `messages`, `prompt`"),
        (b'{"inputs": 3}', 422, "$.inputs"),
        (b'{"messages": "hi"}', 422, "$.messages"),
        (b'{"inputs": ""}', 422, "`inputs` cannot be empty"),
        (b'{"x": "' + b"x" * 3000 + b'"}', 413, "larger"),
    ],
)
def test_a_wrong_invocation_is_told_what_is_wrong(body: bytes, status: int, words: str) -> None:
    found, message = error_of(ask("/invocations", body, payload_limit=2000))
    assert found == status and words in message


def test_an_invocation_whose_client_leaves_is_cancelled() -> None:
    assert_cancelled("/invocations", b'{"inputs": "hi", "stream": true}')


# ---- Vertex AI -------------------------------------------------------------------------------------------------------


def test_predictions_come_in_the_order_of_the_instances() -> None:
    def script(request: GenerationRequest) -> list[Output]:
        return outputs_of("hello" if request.max_new_tokens == 7 else "world")

    instances = [
        {"inputs": "hi", "parameters": {"max_new_tokens": 7}},
        {"messages": HI, "max_tokens": 8},
        {"inputs": "hi", "parameters": {"max_new_tokens": 7}},
    ]
    answer = ask("/vertex", {"instances": instances}, FakeBackend(script))
    assert answer.json() == {"predictions": ["hello", "world", "hello"]}


def test_every_parameter_of_an_instance_is_honoured() -> None:
    backend = FakeBackend()
    parameters = {"max_new_tokens": 9, "seed": 5, "temperature": 0.5, "top_k": 3, "return_full_text": True}
    answer = ask("/vertex", {"instances": [{"inputs": "hi ", "parameters": parameters}]}, backend)
    assert answer.json() == {"predictions": ["hi hello world"]}
    (request,) = backend.requests
    sampling = parameters_of(request)
    assert (request.max_new_tokens, sampling.seed, sampling.temperature, sampling.top_k) == (9, 5, 0.5, 3)


def test_an_instance_may_be_greedy() -> None:
    def samples(parameters: dict[str, Any]) -> bool:
        backend = FakeBackend()
        ask("/vertex", {"instances": [{"inputs": "hi", "parameters": parameters}]}, backend)
        return parameters_of(backend.requests[0]).do_sample

    assert not samples({})
    assert samples({"do_sample": True})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "`instances`"),
        ({"instances": []}, "`instances` cannot be empty"),
        ({"instances": [{"inputs": "hi"}, {}]}, "instances[1]: one of these fields is required"),
        ({"instances": [{"inputs": "hi"}, {"inputs": ""}]}, "instances[1]: `inputs` cannot be empty"),
        ({"instances": [{"messages": HI, "stream": True}]}, "instances[0]: `stream` is not supported on this route"),
        ({"instances": [{"inputs": "hi"}] * 129}, "129 sequences"),
    ],
)
def test_a_wrong_instance_is_named(body: Any, words: str) -> None:
    status, message = error_of(ask("/vertex", body))
    assert status == 422 and words in message
    assert message.startswith("Input validation error: ") and message.count("Input validation error") == 1


def test_an_instance_that_fails_ends_the_others() -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=1)
        answer = await post(app_for(backend), "/vertex", {"instances": [{"inputs": "hi"}, {"inputs": ""}]})
        assert answer.status == 422
        await until(lambda: len(backend.cancelled) == len(backend.requests))

    asyncio.run(main())


def test_a_failed_generation_is_no_internal_error() -> None:
    def script(request: GenerationRequest) -> list[Output]:
        return [Output(error="out of memory")]

    answer = ask("/vertex", {"instances": [{"inputs": "hi"}]}, FakeBackend(script))
    assert (answer.status, answer.json()["error_type"]) == (GenerationFailed.status, "generation")


def test_instances_beyond_the_free_places_are_told_to_come_back() -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=0)
        app = app_for(backend, max_concurrent_requests=2)
        waiting = Call(app, "POST", "/generate", [b'{"inputs": "hi"}'])
        await until(lambda: backend.requests)
        answer = await post(app, "/vertex", {"instances": [{"inputs": "hi"}] * 2})
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        backend.go_on.set()
        assert (await waiting.answer()).status == 200
        assert (await post(app, "/vertex", {"instances": [{"inputs": "hi"}] * 2})).status == 200

    asyncio.run(main())


def test_predictions_whose_client_leaves_are_all_cancelled() -> None:
    assert_cancelled("/vertex", b'{"instances": [{"inputs": "hi"}, {"inputs": "ho"}]}', num_requests=2)


def test_the_paths_that_vertex_chooses_are_served() -> None:
    async def main() -> None:
        app = app_for(vertex_predict_route="/v1/endpoints/1:predict", vertex_health_route="/alive")
        answer = await post(app, "/v1/endpoints/1:predict", {"instances": [{"inputs": "hi"}]})
        assert answer.json() == {"predictions": ["hello world"]}
        assert (await get(app, "/alive")).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/predict", "/v1/endpoints/1/deployedModels/2"])
def test_errors_on_the_path_that_vertex_chooses_are_those_of_its_route(path: str) -> None:
    """Not those of the API that has other routes there."""
    answers = [ask(each, {"instances": []}, vertex_predict_route=path) for each in (path, "/vertex")]
    assert [answer.status for answer in answers] == [422, 422]
    assert answers[0].json() == answers[1].json()


def test_the_port_of_vertex_is_read_from_its_variable() -> None:
    assert vertex_port({"AIP_HTTP_PORT": "8080"}) == 8080
    assert vertex_port({"AIP_HTTP_PORT": ""}) is None
    assert vertex_port({}) is None


@pytest.mark.parametrize("port", ["http", "0", "70000", "-1", "8080.5"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(OptionError, match="AIP_HTTP_PORT"):
        vertex_port({"AIP_HTTP_PORT": port})


def test_the_routes_of_vertex_are_read_from_their_variables() -> None:
    assert vertex_route({"AIP_PREDICT_ROUTE": "/predict"}, "AIP_PREDICT_ROUTE") == "/predict"
    assert vertex_route({}, "AIP_PREDICT_ROUTE") is None
    for path in ("predict", "/{x}"):
        with pytest.raises(OptionError, match="AIP_PREDICT_ROUTE"):
            vertex_route({"AIP_PREDICT_ROUTE": path}, "AIP_PREDICT_ROUTE")


# ---- KServe ----------------------------------------------------------------------------------------------------------


def test_bytes_are_answered_with_bytes() -> None:
    tensor = {"name": "in", "shape": [1, 3], "datatype": "UINT8", "data": list("hé".encode())}
    answer = ask(INFER, {"id": "7", "inputs": [tensor], "outputs": [{"name": "out"}]}).json()
    data = list(b"hello world")
    output = {"name": "out", "shape": [1, len(data)], "datatype": "BYTES", "data": data}
    assert (answer["id"], answer["outputs"]) == ("7", [output])


def test_strings_are_answered_with_strings() -> None:
    tensor = {"name": "in", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
    (output,) = ask(INFER, {"inputs": [tensor]}).json()["outputs"]
    assert output == {"name": "in", "shape": [2], "datatype": "BYTES", "data": ["hello world"] * 2}


def test_parameters_are_those_of_the_native_api() -> None:
    backend = FakeBackend()
    ask(INFER, {"parameters": {"max_new_tokens": 9, "seed": 5}, "inputs": [{"name": "in", "data": ["a"]}]}, backend)
    assert (backend.requests[0].max_new_tokens, parameters_of(backend.requests[0]).seed) == (9, 5)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "`inputs`"),
        ({"inputs": []}, "`inputs` cannot be empty"),
        ({"inputs": [{"name": "in", "data": []}]}, "inputs[0]: `data` must be"),
        ({"inputs": [{"name": "in", "data": ["a", 1]}]}, "inputs[0]: `data` must be"),
        ({"inputs": [{"name": "in", "data": [256]}]}, "255"),
        ({"inputs": [{"name": "in", "data": ["a"]}, {"name": "in", "data": [255]}]}, "inputs[1]: `data` is not UTF-8"),
        ({"inputs": [{"name": "in", "data": ["a"]}], "outputs": []}, "1 `inputs` and 0 `outputs`"),
        ({"inputs": [{"name": "in", "data": [""]}]}, "inputs[0]: `inputs` cannot be empty"),
    ],
)
def test_a_wrong_tensor_is_named(body: Any, words: str) -> None:
    status, message = error_of(ask(INFER, body))
    assert status == 422 and words in message


def test_the_server_and_the_model_describe_themselves() -> None:
    async def main() -> None:
        app = app_for()
        server = (await get(app, "/v2")).json()
        assert (server["name"], server["extensions"]) == ("text-generation-inference", ["health", "models", "metrics"])
        model = (await get(app, MODEL)).json()
        assert (model["version"], model["extensions"]) == ("1", ["infer", "ready"])
        assert (model["name"], model["versions"], model["inputs"][0]["datatype"]) == ("any", ["1"], "BYTES")

    asyncio.run(main())


@pytest.mark.parametrize("healthy", [True, False])
def test_ready_says_whether_the_model_computes_and_live_does_not_care(healthy: bool) -> None:
    async def main() -> None:
        app = app_for(FakeBackend(health=healthy))
        assert (await get(app, "/v2/health/live")).json() == {"live": True}
        for path in ("/v2/health/ready", f"{MODEL}/ready"):
            answer = await get(app, path)
            assert answer.status == (200 if healthy else 503)
            assert answer.json().get("ready", False) is healthy
            assert answer.json().get("live", False) is healthy  # TGI's name for it

    asyncio.run(main())


def assert_cancelled(path: str, body: bytes, num_requests: int = 1) -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=1)
        call = Call(app_for(backend), "POST", path, [body])
        await until(lambda: len(backend.requests) == num_requests)
        call.hang_up()
        await until(lambda: len(backend.cancelled) == num_requests)
        await asyncio.wait_for(call.task, 5)

    asyncio.run(main())
