from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.api.native import GenerateParameters
from legato.http.scheduler import NO_STATE
from legato.ipc.messages import ServerState
from legato.scheduling.state import Output
from tests.generation import parameters_of
from tests.http.asgi import Call, FakeBackend, app_for, ask, call, get, post, token_ids, until

# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_one_request_too_many_is_told_to_come_back(path: str) -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=0)
        app = app_for(backend, max_concurrent_requests=1)
        waiting = Call(app, "POST", "/generate", [b'{"inputs": "hi"}'])
        await until(lambda: backend.requests)
        refused = await post(app, path, {"inputs": "hi"})
        assert refused.status == 429
        assert refused.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        assert int(refused.headers["retry-after"]) >= 1
        backend.go_on.set()
        assert (await waiting.answer()).status == 200
        assert (await post(app, path, {"inputs": "hi"})).status == 200

    asyncio.run(main())


def test_best_of_takes_a_permit_for_each_sequence() -> None:
    parameters = {"best_of": 2, "do_sample": True}
    body = {"inputs": "hi", "parameters": parameters}
    assert ask("/generate", body, max_concurrent_requests=1).status == 429
    assert ask("/generate", body, max_concurrent_requests=2).status == 200


def test_a_refused_request_gives_its_permit_back() -> None:
    async def main() -> None:
        app = app_for(max_concurrent_requests=1)
        for _ in range(3):
            assert (await post(app, "/generate", {"inputs": ""})).status == 422
        assert (await post(app, "/generate", {"inputs": "hi"})).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/tokenize"])
def test_a_large_body_is_refused(path: str) -> None:
    async def main() -> None:
        app = app_for(payload_limit=100)
        chunks = [b'{"inputs": "', *[b"x"] * 100, b'"}']
        for headers in ({"content-length": "10000"}, {"content-length": "9" * 400}, {}):
            answer = await call(app, "POST", path, body=chunks, headers=headers)
            assert answer.status == 413
            assert answer.json()["error_type"] == "validation"
        exactly = b'{"inputs": "hello"}'.ljust(100)
        assert (await post(app, path, exactly)).status == 200

    asyncio.run(main())


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/tokenize"])
@pytest.mark.parametrize(("body", "status"), [(b"", 400), (b"{", 400), (b"{}", 422), (b'{"inputs": 3}', 422)])
def test_a_body_that_is_no_request(path: str, body: bytes, status: int) -> None:
    answer = ask(path, body)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error_type"] == "validation"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(GenerateParameters.__struct_fields__)


@settings(deadline=None)
@given(inputs=values | st.text(), parameters=values | st.dictionaries(names, values, max_size=4))
def test_nothing_a_client_sends_is_our_fault(inputs: object, parameters: object) -> None:
    body = json.dumps({"inputs": inputs, "parameters": parameters}).encode("utf-8", "surrogatepass")
    answer = ask("/generate", body)
    assert answer.status in (200, 400, 422, 429)
    assert answer.status == 200 or answer.json()["error_type"] in ("validation", "overloaded")


def test_no_content_type_is_needed() -> None:
    async def main() -> None:
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert (await post(app_for(), "/generate", {"inputs": "hi"}, form)).status == 200

    asyncio.run(main())


def test_an_invalid_request() -> None:
    answer = ask("/generate", {"inputs": ""})
    assert answer.status == 422
    assert answer.json() == {"error": "Input validation error: `inputs` cannot be empty", "error_type": "validation"}


def test_a_failed_generation() -> None:
    answer = ask("/generate", {"inputs": "hi"}, FakeBackend(lambda request: [Output(error="out of memory")]))
    assert answer.status == 424
    assert answer.json() == {
        "error": "Request failed during generation: out of memory",
        "error_type": "generation",
    }


def test_an_unknown_route() -> None:
    answer = ask("/generate/", {"inputs": "hi"})
    assert answer.status == 404
    assert answer.json() == {"error": "There is no route /generate/", "error_type": "not_found"}


def test_a_known_route_with_another_method() -> None:
    answer = asyncio.run(get(app_for(), "/generate"))
    assert answer.status == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error_type"] == "method_not_allowed"


def test_a_bug_is_answered_without_its_text() -> None:
    class Buggy(FakeBackend):
        @property
        def state(self) -> ServerState:
            raise RuntimeError("secret")

    async def main() -> None:
        connection = Call(app_for(Buggy()), "GET", "/health")
        with pytest.raises(RuntimeError):  # goes on to the server, which logs it
            await connection.task
        start, body = connection.sent
        assert start["status"] == 500
        assert json.loads(body["body"]) == {"error": "Internal server error", "error_type": "internal"}

    asyncio.run(main())


# ---- the other routes ------------------------------------------------------------------------------------------------


def test_compat_answers_with_a_list_and_the_full_text() -> None:
    assert ask("/", {"inputs": "hi, "}).json() == [{"generated_text": "hi, hello world"}]
    assert ask("/", {"inputs": "hi, "}, model_pipeline_tag="text-generation").json() == [
        {"generated_text": "hi, hello world"}
    ]


def test_compat_answers_with_the_new_text_where_it_is_told_to() -> None:
    without = {"inputs": "hi", "parameters": {"return_full_text": False}}
    assert ask("/", without).json() == [{"generated_text": "hello world"}]
    assert ask("/", {"inputs": "hi"}, model_pipeline_tag="text2text-generation").json() == [
        {"generated_text": "hello world"}
    ]


def test_compat_streams_if_asked_to() -> None:
    events = ask("/", {"inputs": "hi, ", "stream": True}).events()
    assert events[-1]["generated_text"] == "hi, hello world"


def test_compat_without_parameters_samples_like_generate() -> None:
    for path in ("/", "/generate"):
        backend = FakeBackend()
        ask(path, {"inputs": "hi"}, backend)
        ask(path, {"inputs": "hi", "parameters": {}}, backend)
        assert [parameters_of(request).do_sample for request in backend.requests] == [True, False]


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
def test_health(path: str) -> None:
    async def main() -> None:
        backend = FakeBackend()
        app = app_for(backend)
        healthy = await get(app, path)
        assert (healthy.status, healthy.body) == (200, b"")
        assert (await call(app, "HEAD", path)).status == 200
        backend.health = False
        unhealthy = await get(app, path)
        assert unhealthy.status == 503
        assert unhealthy.json() == {"error": "unhealthy", "error_type": "healthcheck"}

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_liveness_and_readiness(path: str) -> None:
    async def main() -> None:
        backend = FakeBackend()
        app = app_for(backend, api_keys=("key",))
        assert (await get(app, path)).status == 200
        backend.health = False
        refused = await get(app, path)
        assert (refused.status, refused.json()["error_type"]) == (503, "healthcheck")

    asyncio.run(main())


def test_liveness_says_the_age_of_the_oldest_step_and_whether_shards_are_replaced() -> None:
    class Busy(FakeBackend):
        @property
        def state(self) -> ServerState:
            return ServerState(live=True, restarting=True, step_age=1.5)

    async def main() -> None:
        app = app_for(Busy())
        assert (await get(app, "/livez")).json() == {"live": True, "step_age": 1.5, "restarting": True}
        assert (await get(app, "/readyz")).json()["error"] == "the shards are restarting"
        assert (await get(app, "/startupz")).json() == {"stage": "ready", "progress": 1.0}

    asyncio.run(main())


def test_a_scheduler_that_says_nothing_is_not_well() -> None:
    class Silent(FakeBackend):
        @property
        def state(self) -> ServerState:
            return NO_STATE

    async def main() -> None:
        app = app_for(Silent())
        for path in ("/health", "/livez", "/readyz"):
            assert (await get(app, path)).status == 503
        assert (await get(app, "/livez")).json()["error"] == "the scheduler does not answer"

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/v1/completions"])
def test_a_draining_server_admits_no_requests_and_stays_healthy(path: str) -> None:
    async def main() -> None:
        backend = FakeBackend()
        app = app_for(backend)
        drained = await post(app, "/drain", {})
        assert drained.json() == {"draining": True, "running": 2, "queued": 3}
        refused = await post(app, path, {"inputs": "hi", "prompt": "hi"})
        assert (refused.status, refused.json()["error_type"]) == (503, "draining")
        assert refused.headers["retry-after"] == "1"
        assert backend.requests == []
        assert (await get(app, "/health")).status == 200

    asyncio.run(main())


def test_only_those_with_a_key_may_drain() -> None:
    async def main() -> None:
        backend = FakeBackend()
        app = app_for(backend, api_keys=("key",))
        assert (await post(app, "/drain", {})).status == 401
        assert not backend.draining

    asyncio.run(main())


@pytest.mark.parametrize(
    ("client", "headers", "may"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        ("10.0.0.7", {}, False),
        ("::ffff:10.0.0.7", {}, False),
        ("127.0.0.1", {"x-forwarded-for": "10.0.0.7"}, False),
        ("127.0.0.1", {"forwarded": "for=10.0.0.7"}, False),
        ("127.0.0.1", {"origin": "http://evil.example"}, False),
    ],
)
def test_without_keys_only_programs_on_this_machine_may_drain(client: str, headers: dict[str, str], may: bool) -> None:
    async def main() -> None:
        backend = FakeBackend()
        answer = await post(app_for(backend), "/drain", {}, headers, client)
        assert (answer.status, backend.draining) == ((200, True) if may else (403, False))

    asyncio.run(main())


def test_with_a_key_any_machine_may_drain() -> None:
    async def main() -> None:
        backend = FakeBackend()
        headers = {"authorization": "Bearer key"}
        assert (await post(app_for(backend, api_keys=("key",)), "/drain", {}, headers, "10.0.0.7")).status == 200
        assert backend.draining

    asyncio.run(main())


def test_info() -> None:
    assert asyncio.run(get(app_for(version="1.2.3"), "/info")).json() == {
        "model_id": "tiny",
        "model_sha": None,
        "model_pipeline_tag": None,
        "max_concurrent_requests": 128,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_input_tokens": 64,
        "max_total_tokens": 100,
        "validation_workers": 2,
        "max_client_batch_size": 4,
        "router": "text-generation-router",
        "version": "1.2.3",
        "sha": None,
        "docker_label": None,
    }


def test_tokenize_counts_bytes() -> None:
    text = "hello é日 x"
    tokens = ask("/tokenize", {"inputs": text}).json()
    assert [token["id"] for token in tokens] == [0, *token_ids(text)]
    assert tokens[0] == {"id": 0, "text": "", "start": 0, "stop": 0}
    for token in tokens:
        assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]
    assert tokens[-1]["stop"] == len(text.encode())
    assert [token["text"] for token in tokens].count("日") == 3


def test_cross_origin_requests() -> None:
    async def main() -> None:
        app = app_for()
        preflight = {
            "origin": "http://page",
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
        }
        allowed = await call(app, "OPTIONS", "/generate", headers=preflight)
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-origin"] == "*"
        for path in ("/generate", "/generate_stream"):
            answer = await post(app, path, {"inputs": "hi"}, {"origin": "http://page"})
            assert answer.headers["access-control-allow-origin"] == "*"
        listed = app_for(cors_allow_origin=("http://page",))
        answer = await post(listed, "/generate", {"inputs": "hi"}, {"origin": "http://page"})
        assert answer.headers["access-control-allow-origin"] == "http://page"
        answer = await post(listed, "/generate", {"inputs": "hi"}, {"origin": "http://other"})
        assert "access-control-allow-origin" not in answer.headers

    asyncio.run(main())


def test_options_tells_the_methods() -> None:
    answer = asyncio.run(call(app_for(), "OPTIONS", "/generate"))
    assert (answer.status, answer.headers["allow"]) == (204, "POST")
