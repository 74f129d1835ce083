"""The pages in a real browser, against real processes. Screenshots go to $LEGATO_SCREENSHOTS, if it is set."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.house import CHAT_TEMPLATE
from tests.integration.client import Client
from tests.integration.processes import Launched, launched
from tests.pages.browser import Page, browsing, executable
from tests.tiny_models import tiny_llama

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(executable() is None, reason="no Chromium is installed (Debian: apt install chromium)"),
]
KEY = "a-key-for-pages"
ENTER, ESCAPE, RIGHT, TAB = ("Enter", 13), ("Escape", 27), ("ArrowRight", 39), ("Tab", 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Launched]:
    words = ("--fake", "--fake-step-ms=10", "--max-batch-size=4", "--max-batch-total-tokens=4096")
    with launched(tmp_path_factory.mktemp("pages"), model, *words) as running:
        yield running


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("LEGATO_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def browse(test: Callable[[Page], Awaitable[None]]) -> None:
    async def main() -> None:
        async with browsing() as page:
            await test(page)
            assert page.problems == []

    asyncio.run(main())


async def ask(page: Page, text: str) -> None:
    await page.until("document.activeElement.id === 'input'")
    await page.type(text)
    await page.press(*ENTER)


ANSWERED = (
    "document.querySelector('#stop').disabled && document.querySelectorAll('.message.assistant .tools button').length"
)


def test_a_chat_from_the_first_address_to_an_edited_question(server: Launched, screenshots: Path) -> None:
    async def test(page: Page) -> None:
        await page.visit(f"http://127.0.0.1:{server.port}/")
        await page.until("location.pathname === '/ui' && document.querySelector('#model').textContent")
        await page.run("document.querySelector('[name=max_tokens]').value = 40")
        await ask(page, "Hello there")
        await page.until(ANSWERED)
        assert await page.run("document.querySelectorAll('.message.assistant .token').length") >= 30
        note = await page.text(".message.assistant .who span")
        assert "40 tokens" in note and "tokens/s" in note and "stopped at max tokens" in note
        await page.point_at(".message.assistant .token:nth-child(5)")
        await page.until("!document.querySelector('#probabilities').classList.contains('hidden')")
        assert (await page.text("#probabilities")).count("%") == 5
        await page.screenshot(screenshots / "ui-chat-light.png")
        await page.screenshot(screenshots / "ui-chat-dark.png", dark=True)
        first = await page.text(".message.assistant .text")
        await page.run("document.querySelector('[name=temperature]').value = 0")
        await page.click(".message.assistant .tools button:nth-child(1)")
        await page.until(f"{ANSWERED} && document.querySelector('.message.assistant .text').textContent !== ''")
        assert await page.run("document.querySelectorAll('.message').length") == 2
        await page.click(".message.user .tools button")
        await page.until("document.activeElement.tagName === 'TEXTAREA' && document.activeElement.id !== 'input'")
        await page.run("document.activeElement.value = 'Something else'")
        await page.click(".message.user .text button.primary")
        await page.until(
            f"{ANSWERED} && document.querySelector('.message.user .text').textContent === 'Something else'"
        )
        assert await page.text(".message.assistant .text") != first

    browse(test)


def test_a_generation_is_stopped_by_button_and_by_key(server: Launched) -> None:
    async def test(page: Page) -> None:
        await page.visit(f"http://127.0.0.1:{server.port}/ui")
        await page.until("document.querySelector('#model').textContent")
        await page.run("document.querySelector('[name=max_tokens]').value = 2000")
        for stop in (lambda: page.click("#stop"), lambda: page.press(*ESCAPE)):
            await page.run("document.querySelector('#input').focus()")
            await ask(page, "Go on for ever")
            await page.until("document.querySelectorAll('.message:last-child .token').length > 5")
            await stop()
            await page.until("document.querySelector('.message:last-child .who span').textContent.endsWith('stopped')")
            assert await page.run("document.querySelector('#stop').disabled")

    browse(test)


def test_completions_and_the_keyboard_alone(server: Launched, screenshots: Path) -> None:
    async def test(page: Page) -> None:
        await page.visit(f"http://127.0.0.1:{server.port}/ui")
        await page.until("document.querySelector('#model').textContent")
        await page.run(
            "(() => { const mode = document.querySelector('[name=mode]'); mode.value = 'completion';"
            " mode.dispatchEvent(new Event('change')); document.querySelector('[name=max_tokens]').value = 12;"
            " document.querySelector('[name=shade]').click(); document.querySelector('#input').focus(); })()"
        )
        await ask(page, "Once upon a time")
        await page.until(ANSWERED)
        await page.run("document.querySelector('.messages').focus()")
        for _ in range(40):  # Tab reaches the tokens, arrows move along them
            await page.press(*TAB)
            if await page.run("document.activeElement.classList.contains('token')"):
                break
        await page.press(*RIGHT)
        assert await page.run("document.activeElement === document.querySelectorAll('.message.assistant .token')[1]"), (
            await page.run("document.activeElement.outerHTML")
        )
        assert "%" in await page.text("#probabilities")
        await page.screenshot(screenshots / "ui-completion-light.png")

    browse(test)


def test_an_error_of_the_server_is_shown(server: Launched) -> None:
    async def test(page: Page) -> None:
        await page.visit(f"http://127.0.0.1:{server.port}/ui")
        await page.until("document.querySelector('#model').textContent")
        await page.run("document.querySelector('[name=max_tokens]').value = 99999999999")
        await ask(page, "Hello")
        await page.until("document.querySelector('.message.assistant .error').textContent")
        page.problems.clear()  # the console lists the answer with status 400

    browse(test)


def test_the_dashboard_shows_the_batch_the_queue_and_why_it_waits(server: Launched, screenshots: Path) -> None:
    async def test(page: Page) -> None:
        body = {"inputs": "word " * 30, "parameters": {"max_new_tokens": 600}}
        client = Client(server.port)
        calls = [asyncio.create_task(asyncio.to_thread(client.post, "/generate", body)) for _ in range(7)]
        await page.visit(f"http://127.0.0.1:{server.port}/dashboard")
        await page.until("document.querySelectorAll('#running tr').length === 4")
        assert "all 4 rows are in use" in await page.text("#waiting tr td:last-child")
        await page.until("document.querySelector('#tiles').textContent.match(/Tokens\\/s[1-9]/)")
        assert await page.text("#status") == "healthy"
        assert await page.run("document.querySelectorAll('#blocks .decode').length") == 4
        await asyncio.sleep(3)
        await page.screenshot(screenshots / "dashboard-light.png")
        await page.screenshot(screenshots / "dashboard-dark.png", dark=True)
        await asyncio.gather(*calls)
        await page.until("document.querySelectorAll('#running tr').length === 0")
        await page.click("#pause")
        assert await page.run("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"

    browse(test)


def test_the_api_page_shows_every_route_and_sends_requests(server: Launched, screenshots: Path) -> None:
    async def test(page: Page) -> None:
        await page.visit(f"http://127.0.0.1:{server.port}/docs")
        await page.until("document.querySelectorAll('#schemas details').length")
        document = "fetch('api-doc/openapi.json').then((answer) => answer.json())"
        shown = "document.querySelectorAll('#schemas details').length"
        assert await page.run(f"{document}.then((api) => Object.keys(api.components.schemas).length === {shown})")
        await page.click("#routes summary")
        await page.click("#routes details[open] button")
        await page.until("document.querySelector('#routes pre').textContent.includes('generated_text')")
        await page.screenshot(screenshots / "docs-light.png")

    browse(test)


@pytest.mark.parametrize("name", ["ui", "dashboard", "docs"])
def test_no_page_is_wider_than_a_phone(server: Launched, name: str) -> None:
    async def test(page: Page) -> None:
        phone = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
        await page.call("Emulation.setDeviceMetricsOverride", **phone)
        await page.visit(f"http://127.0.0.1:{server.port}/{name}")
        await page.until("document.querySelector('#tiles b, #routes details, #model:not(:empty)')")
        assert await page.run("document.documentElement.scrollWidth") <= 360

    browse(test)


def test_who_scrolls_up_during_an_answer_stays_there(server: Launched) -> None:
    async def test(page: Page) -> None:
        await page.visit(f"http://127.0.0.1:{server.port}/ui")
        await page.until("document.querySelector('#model').textContent")
        await page.run("document.querySelector('[name=max_tokens]').value = 1500")
        await ask(page, "Hello")
        log = "document.querySelector('#messages')"
        await page.until(f"{log}.scrollTop > 200")
        await page.run(f"{log}.scrollTop = 0")
        height = await page.run(f"{log}.scrollHeight")
        await page.until(f"{log}.scrollHeight > {height} + 100")
        assert await page.run(f"{log}.scrollTop") == 0
        await page.press(*ESCAPE)

    browse(test)


def test_the_dashboard_of_a_server_that_is_started_again_counts_from_zero(tmp_path: Path, model: Path) -> None:
    async def test(page: Page) -> None:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
        with launched(tmp_path / "first", model, "--fake") as first:
            Client(first.port).post("/generate", {"inputs": "word", "parameters": {"max_new_tokens": 20}})
            await page.visit(f"http://127.0.0.1:{first.port}/dashboard")
            await page.until("document.querySelector('#tiles').textContent.includes('20 so far')")
        await page.until("document.querySelector('#status').textContent.includes('does not answer')")
        with launched(tmp_path / "second", model, "--fake", f"--port={first.port}"):
            await page.until("document.querySelector('#status').textContent === 'healthy'")
            tiles = await page.text("#tiles")
            assert "0 so far" in tiles and "Requests0" in tiles
        page.problems.clear()  # the console lists the requests without an answer

    browse(test)


def test_a_server_with_keys_asks_for_one(tmp_path: Path, model: Path, screenshots: Path) -> None:
    async def test(page: Page) -> None:
        await page.visit(f"http://127.0.0.1:{keyed.port}/dashboard")
        await page.until("document.querySelector('dialog[open]')")
        await page.type("wrong")
        await page.press(*ENTER)
        await page.until("document.querySelector('dialog[open]')?.textContent.includes('not valid')")
        await page.screenshot(screenshots / "key-light.png")
        await page.type(KEY)
        await page.press(*ENTER)
        await page.until("document.querySelector('#status').textContent === 'healthy'")
        await page.visit(f"http://127.0.0.1:{keyed.port}/docs")
        await page.until("document.querySelectorAll('#routes details').length")
        page.problems.clear()  # the console lists the answers with status 401

    with launched(tmp_path, model, "--fake", f"--api-key={KEY}") as keyed:
        browse(test)
