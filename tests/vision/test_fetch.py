"""Server-side request forgery (row 24 of the fault table)."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from legato.vision import fetch as images_fetch
from legato.vision.fetch import Fetcher, FetchRefused, is_public

ANYBODY: Callable[[Any], bool] = lambda address: True  # noqa: E731


@contextmanager
def host(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[str]]]:
    """A local server, and the paths requested from it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            answer(self)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://localhost:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def say(data: bytes, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


@pytest.fixture(autouse=True)
def only_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` may also be ::1, where our servers do not listen."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, port, *_, **__: look_up(host, port, socket.AF_INET, socket.SOCK_STREAM)
    )


def test_an_image_on_an_allowed_host_is_fetched() -> None:
    with host(say(b"picture")) as (url, asked):
        assert Fetcher(("LocalHost.",), 100, ANYBODY).fetch(f"{url}/a/b.png?c=d") == b"picture"
        assert asked == ["/a/b.png?c=d"]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1",
    ],
)  # fmt: skip
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_internet_addresses_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_an_allowed_host_with_a_private_address_is_refused() -> None:
    with host(say(b"secret")) as (url, asked):
        with pytest.raises(FetchRefused, match="does not have a public address"):
            Fetcher(("localhost", "127.0.0.1"), 100).fetch(url)
        assert not asked


def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("a packet left"))
    with pytest.raises(FetchRefused, match="does not have a public address"):
        Fetcher(("pictures.example",), 100).fetch("http://pictures.example/a.png")


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding has no effect: there is no second lookup."""
    looked_up: list[str] = []
    called: list[Any] = []

    def look_up(name: str, port: int, **_: Any) -> list[Any]:
        looked_up.append(name)
        return [(2, 1, 6, "", ("8.8.8.8", port))]

    def connect(address: Any, timeout: float) -> socket.socket:
        called.append(address)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(FetchRefused, match=r"cannot be fetched from pictures\.example"):
        Fetcher(("pictures.example",), 100).fetch("http://pictures.example:8080/a.png")
    assert looked_up == ["pictures.example"] and called == [("8.8.8.8", 8080)]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/", "http://[::1]:{port}/", "http://2130706433:{port}/", "http://0x7f.1:{port}/",
        "http://0177.0.0.1:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://good.example\\@127.0.0.1:{port}/",
        "http://good.example@127.0.0.1:{port}/", "http://127.0.0.1:{port}\\good.example/", "http://:{port}/",
        "http://good.example.127.0.0.1.nip.io:{port}/", "http://good.example:{port}@localhost/", "http:///x",
        "http://good.example%00.localhost:{port}/", "http://localhost:{port}/", "http://good.example:99999/",
        "http://good.example\t.localhost:{port}/", "http://gооd.example:{port}/", "http://[good.example]:{port}/",
    ],
)  # fmt: skip
def test_a_host_that_is_not_allowed_is_never_contacted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a question to a name server left"))
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("a packet left"))
    with pytest.raises(FetchRefused, match=r"--image-url-allow|invalid URL"):
        Fetcher(("good.example",), 100, ANYBODY).fetch(url.replace("{port}", "80"))


@pytest.mark.parametrize(
    "target",
    [
        "file:///etc/passwd",
        "ftp://localhost/a",
        "http://elsewhere.example/",
        "//169.254.169.254/",
        "http://a@localhost/",
    ],
)
def test_every_hop_is_checked_like_the_first(target: str) -> None:
    with host(say(b"", 302, Location=target)) as (url, asked):
        with pytest.raises(FetchRefused, match=r"--image-url-allow|invalid URL"):
            Fetcher(("localhost",), 100, ANYBODY).fetch(f"{url}/first")
        assert asked == ["/first"]


def test_a_hop_to_an_allowed_host_with_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name for the machine itself, in the list or not, that is public when the first hop is checked."""
    with host(say(b"", 307, Location="http://inside.example/secret")) as (url, asked):
        port = int(url.rpartition(":")[2])
        look_up = socket.getaddrinfo

        def names(name: str, *arguments: Any, **options: Any) -> Any:
            return [(2, 1, 6, "", ("10.0.0.1", 80))] if name == "inside.example" else look_up("127.0.0.1", port)

        monkeypatch.setattr(socket, "getaddrinfo", names)
        fetcher = Fetcher(("localhost", "inside.example"), 100, lambda address: str(address) == "127.0.0.1")
        with pytest.raises(FetchRefused, match=r"inside\.example does not have a public address"):
            fetcher.fetch(f"{url}/first")
        assert asked == ["/first"]


def test_a_redirect_is_followed_a_few_times() -> None:
    def redirect(handler: BaseHTTPRequestHandler) -> None:
        number = int(handler.path[1:])
        say(b"picture")(handler) if number == 0 else say(b"", 302, Location=f"/{number - 1}")(handler)

    with host(redirect) as (url, asked):
        assert Fetcher(("localhost",), 100, ANYBODY).fetch(f"{url}/3") == b"picture"
        assert asked == ["/3", "/2", "/1", "/0"]
        with pytest.raises(FetchRefused, match="more than 3 redirects"):
            Fetcher(("localhost",), 100, ANYBODY).fetch(f"{url}/9")


@pytest.mark.parametrize("part", ["the name", "the headers", "redirects"])
def test_the_deadline_is_over_everything(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation is quick enough for its own timeout."""
    monkeypatch.setattr(images_fetch, "DEADLINE", 0.3)
    stop = threading.Event()

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        if part == "redirects":
            stop.wait(0.15)
            say(b"", 302, Location="/again")(handler)
        for _ in range(100 if part == "the headers" else 0):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Filler: "[:1])
            handler.wfile.flush()
            if stop.wait(0.1):
                return

    if part == "the name":
        look_up = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **o: stop.wait(5) and look_up(*a, **o))
    monkeypatch.setattr(images_fetch, "MAX_REDIRECTS", 100)
    with host(slowly) as (url, _):
        with pytest.raises(FetchRefused, match="within 0 seconds"):
            Fetcher(("localhost",), 100, ANYBODY).fetch(url)
        stop.set()


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "101"}, {"Content-Length": "99999999999"}])
def test_an_image_larger_than_the_limit_is_refused(headers: dict[str, str]) -> None:
    with host(say(bytes(101), **headers)) as (url, _), pytest.raises(FetchRefused, match="larger than 100 bytes"):
        Fetcher(("localhost",), 100, ANYBODY).fetch(url)


def test_a_slow_server_runs_into_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_fetch, "DEADLINE", 0.2)

    def drip(handler: BaseHTTPRequestHandler) -> None:
        say(b"")(handler)
        for _ in range(50):
            handler.wfile.write(b".")
            handler.wfile.flush()
            if stop.wait(0.02):
                return

    stop = threading.Event()
    with host(drip) as (url, _):
        with pytest.raises(FetchRefused, match="within 0 seconds"):
            Fetcher(("localhost",), 10_000, ANYBODY).fetch(url)
        stop.set()


def test_a_response_that_is_not_http_is_refused() -> None:
    def babble(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"SSH-2.0\r\n\r\n")

    with host(babble) as (url, _), pytest.raises(FetchRefused, match="cannot be fetched from localhost"):
        Fetcher(("localhost",), 100, ANYBODY).fetch(url)
