"""The pages as a browser gets them: their own files only, open where the data is not."""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files
from pathlib import PurePosixPath

import msgspec
import pytest

from legato.http.auth import OPEN_PATHS
from legato.http.pages.routes import MEDIA_TYPES, PAGES
from tests.http.asgi import DASHBOARD, Answer, FakeBackend, app_for, get

STATIC = {file.name: file.read_text() for file in files("legato.http.pages").joinpath("static").iterdir()}
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def fetch(path: str, api_keys: tuple[str, ...] = (), **headers: str) -> Answer:
    return asyncio.run(get(app_for(api_keys=api_keys), path, headers))


def test_a_browser_is_led_to_the_page_and_a_program_gets_tgis_answer() -> None:
    answer = fetch("/", accept=BROWSER)
    assert (answer.status, answer.headers["location"]) == (303, "ui")
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        answer = fetch("/", **headers)
        assert (answer.status, answer.body) == (200, b"")
    sick = asyncio.run(get(app_for(FakeBackend(health=False)), "/"))
    assert sick.status == 503


def test_the_reference_is_open_and_its_data_is_not() -> None:
    assert fetch("/docs", api_keys=("key",)).status == 200
    assert fetch("/api-doc/openapi.json", api_keys=("key",)).status == 401


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_nothing_that_its_policy_forbids(page: str) -> None:
    answer = fetch(f"/{page}")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    body = answer.body.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|style=", body), "inline code or style"
    loaded = re.findall(r'(?:src|href)="(pages/[^"]+)"', body)
    assert loaded
    for path in loaded:
        assert fetch(f"/{path}").status == 200


@pytest.mark.parametrize("name", sorted(name for name in STATIC if not name.endswith(".html")))
def test_a_file_has_its_type_and_is_open(name: str) -> None:
    answer = fetch(f"/pages/{name}", api_keys=("key",))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith(MEDIA_TYPES[PurePosixPath(name).suffix[1:]])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert f"/pages/{name}" in OPEN_PATHS


@pytest.mark.parametrize("name", sorted(STATIC))
def test_no_file_mentions_another_host_or_writes_html(name: str) -> None:
    text = STATIC[name].replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, which is never loaded
    assert not re.search(r"https?://|//cdn|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)


@pytest.mark.parametrize(
    "path", ["/pages/nothing.js", "/pages/ui.html", "/pages/..%2f..%2fauth.py", "/pages/routes.py"]
)
def test_there_are_no_other_files(path: str) -> None:
    assert fetch(path).status == 404


def test_pages_are_open_and_their_data_is_not() -> None:
    for page in PAGES:
        assert fetch(f"/{page}", api_keys=("key",)).status == 200
    assert fetch("/dashboard/data", api_keys=("key",)).status == 401
    answer = fetch("/dashboard/data", api_keys=("key",), authorization="Bearer key")
    assert (answer.status, answer.body) == (200, msgspec.json.encode(DASHBOARD))
    assert answer.headers["cache-control"] == "no-store"
