"""Row 27 of the fault table: no key, or nearly one, on every route that there is."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from contextlib import suppress
from typing import Any

import pytest
from starlette.routing import Route

from legato.http.auth import OPEN_METHODS, OPEN_PATHS, RequireKey
from tests.faults.scale import cases
from tests.http.asgi import app_for, call

KEY = "Correct-Horse-Battery-Staple-0123456789"
WRONG = {
    "no key": {},
    "an empty key": {"authorization": "Bearer "},
    "another key": {"authorization": "Bearer " + "x" * len(KEY)},
    "the beginning of the key": {"authorization": f"Bearer {KEY[:-1]}"},
    "the key and more": {"authorization": f"Bearer {KEY}0"},
    "the key in other letters": {"authorization": f"Bearer {KEY.lower()}"},
    "the key without its scheme": {"authorization": KEY},
    "the key of another scheme": {"authorization": f"Basic {KEY}"},
    "the key in quotes": {"authorization": f'Bearer "{KEY}"'},
    "the key in a cookie": {"cookie": f"api_key={KEY}"},
    "nearly the key in a header of its own": {"x-api-key": KEY.swapcase()},
}


def routes_of(app: Any) -> list[Route]:
    """Of the application itself, however many layers are around it."""
    while not hasattr(app, "routes"):
        app = app._app
    return [route for route in app.routes if isinstance(route, Route)]


APP = app_for(api_keys=(KEY,))
ROUTES = sorted(
    (method, re.sub(r"{[^}]*}", "m", route.path.replace("{version}", "1")))
    for route in routes_of(APP)
    for method in (*(route.methods or ()), "OPTIONS", "DELETE")
)
CLOSED = [(method, path) for method, path in ROUTES if not (method in OPEN_METHODS and path in OPEN_PATHS)]


def test_the_routes_are_those_of_the_application() -> None:
    paths = {path for _, path in ROUTES}
    assert {"/", "/generate", "/invocations", "/vertex", "/docs", "/metrics", "/info", "/v1/models/m"} <= paths
    assert len(paths) >= 20
    assert not any("{" in path for path in paths)


@pytest.mark.parametrize("name", WRONG)
def test_without_the_very_key_every_route_is_closed(name: str) -> None:
    async def main() -> None:
        for method, path in CLOSED:
            answer = await call(APP, method, path, headers=WRONG[name])
            assert answer.status == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert KEY.lower() not in answer.body.decode().lower()

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/generate/", "//generate", "/generate%2f", "/Generate", "/../generate", "/nothing"])
def test_no_way_of_writing_a_path_goes_around_the_check(path: str) -> None:
    assert asyncio.run(call(APP, "POST", path)).status == 401


def test_with_the_key_every_route_is_open() -> None:
    async def main() -> None:
        for method, path in CLOSED:
            for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
                assert (await call(APP, method, path, headers=headers)).status != 401, (method, path)

    asyncio.run(main())


@pytest.mark.usefixtures("small_heap")
def test_time_does_not_tell_how_much_of_a_key_is_right() -> None:
    """A key that is wrong at once, one that is wrong at its end, and nothing of one: less than a microsecond apart."""
    long = KEY * 8
    guesses = ["x" + long[1:], long[:-1] + "x", "x" * len(long)]
    seconds = {guess: _seconds_to_refuse(long, guess, 0) for guess in guesses}
    for _ in range(cases(full=15, quick=5)):  # in turns, because machines have better and worse moments
        for guess in guesses:
            seconds[guess] += _seconds_to_refuse(long, guess, cases(full=2000, quick=1000))
    means = [statistics.mean(_without_interruptions(seconds[guess])) for guess in guesses]
    assert max(means) - min(means) < 1e-6


def _without_interruptions(seconds: list[float]) -> list[float]:
    return sorted(seconds)[: len(seconds) * 9 // 10]


def _seconds_to_refuse(key: str, guess: str, times: int) -> list[float]:
    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        pass

    guard = RequireKey(nothing, [key], refuse=lambda path, error, headers: nothing)  # type: ignore[arg-type,return-value]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/x",
        "headers": [(b"authorization", b"Bearer " + guess.encode())],
    }
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        with suppress(StopIteration):
            guard(scope, None, None).send(None)  # type: ignore[arg-type]
        taken.append(time.perf_counter() - started)
    return taken
