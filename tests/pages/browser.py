"""Headless Chromium, driven over its DevTools protocol: nothing but a WebSocket is needed."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PATIENCE = 30.0


def executable() -> str | None:
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))
    return next((path for path in found if path), None)


class Page:
    """One tab. What goes wrong in it is in `problems`: exceptions, failed loads, violations of the policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.problems: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def _read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            elif found["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(found["params"]["exceptionDetails"]))
            elif found["method"] == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
                self.problems.append(str(found["params"]["entry"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        found = await asyncio.wait_for(answer, PATIENCE)
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    async def visit(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """A JavaScript expression that becomes true."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            if await self.run(f"(() => {{ try {{ return !!({condition}); }} catch {{ return false; }} }})()"):
                return
            assert asyncio.get_running_loop().time() < deadline, f"{condition} is not true; {self.problems}"
            await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def click(self, selector: str) -> None:
        x, y = await self._centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def point_at(self, selector: str) -> None:
        x, y = await self._centre(selector)
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def _centre(self, selector: str) -> tuple[float, float]:
        await self.until(f"document.querySelector({json.dumps(selector)})")
        script = """(() => {
          const found = document.querySelector(SELECTOR);
          found.scrollIntoView({block: "center"});
          const box = found.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        })()"""
        place = await self.run(script.replace("SELECTOR", json.dumps(selector)))
        return float(place[0]), float(place[1])

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        names = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **names, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    async def screenshot(self, path: Path, *, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await asyncio.sleep(0.3)
        image = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(image["data"]))


@asynccontextmanager
async def browsing(width: int = 1280, height: int = 860) -> AsyncIterator[Page]:
    program = executable()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
        process = await asyncio.create_subprocess_exec(
            program, *words, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            address = await _address(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=1 << 27) as socket:
                page = Page(socket)
                await page.open()
                yield page
        finally:
            process.terminate()
            await process.wait()


async def _address(file: Path) -> str:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not (file.exists() and file.read_text().count("\n")):
        assert asyncio.get_running_loop().time() < deadline, "the browser does not start"
        await asyncio.sleep(0.05)
    port, path = file.read_text().splitlines()[:2]
    return f"ws://127.0.0.1:{port}{path}"
