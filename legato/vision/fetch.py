"""Fetches images from allowed hosts only, to prevent server-side request forgery.

The host must be on the allow list and all its addresses must be public. The connection goes to an address that was
checked, because a second DNS lookup could return another one. Everything is checked before a connection is opened, at
every redirect anew.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from legato.common.errors import LegatoError

# Seconds for one socket operation, and for the whole image, redirects included.
SOCKET_TIMEOUT, DEADLINE = 5.0, 15.0
REDIRECTS, MAX_REDIRECTS = frozenset({301, 302, 303, 307, 308}), 3
_CHUNK_BYTES = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class FetchRefused(LegatoError):
    """The reason, as a predicate whose subject is the image."""


def is_public(address: Address) -> bool:
    """Also checks an IPv4 address that is embedded in an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if embedded is not None:
            return is_public(embedded)
    return address.is_global and not address.is_multicast


class _Attempt:
    """The connection of an image that is being fetched, to be broken off at the deadline."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False

    @contextmanager
    def watched(self, connection: socket.socket) -> Iterator[None]:
        with connection.dup() as handle:  # TLS takes the descriptor of the connection over
            with self._lock:
                if self._is_cancelled:
                    raise TimeoutError
                self._connection = handle
            try:
                yield
            finally:
                with self._lock:
                    self._connection = None

    def cancel(self) -> None:
        with self._lock, suppress(OSError):
            self._is_cancelled = True
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)


class Fetcher:
    """Blocking, so call it in a thread. `may_call` decides which addresses are allowed."""

    def __init__(self, hosts: tuple[str, ...], max_bytes: int, may_call: Callable[[Address], bool] = is_public) -> None:
        self._hosts = frozenset(_normalized(host) for host in hosts)
        self._max_bytes = max_bytes
        self._may_call = may_call

    def fetch(self, url: str) -> bytes:
        """Within `DEADLINE` seconds, with name lookups, handshakes, headers and redirects: a host that sends a byte now
        and then keeps every single operation within its own timeout."""
        attempt = _Attempt()
        done: Future[bytes] = Future()
        # The lookup of a name cannot be interrupted, so that the thread is left behind; it ends by itself.
        threading.Thread(target=self._fetch, args=(url, attempt, done), name="fetch", daemon=True).start()
        try:
            return done.result(DEADLINE)
        except TimeoutError:
            attempt.cancel()
            raise FetchRefused(f"cannot be fetched within {DEADLINE:.0f} seconds") from None

    def _fetch(self, url: str, attempt: _Attempt, done: Future[bytes]) -> None:
        try:
            for _ in range(MAX_REDIRECTS + 1):
                found = self._hop(url, attempt)
                if isinstance(found, bytes):
                    done.set_result(found)
                    return
                if url.lower().startswith("https:") and not found.lower().startswith("https:"):
                    raise FetchRefused("cannot be fetched: https redirects to another scheme")
                url = found
            raise FetchRefused(f"cannot be fetched: more than {MAX_REDIRECTS} redirects")
        except BaseException as error:  # for whoever waits, whatever it is
            done.set_exception(error)

    def _hop(self, url: str, attempt: _Attempt) -> bytes | str:
        """The image, or the URL to go on with. Every hop is checked like the first."""
        parts = self._checked(url)
        host, port = str(parts.hostname), parts.port or {"http": 80, "https": 443}[parts.scheme]
        address = self._address(host, port)
        try:
            with (
                closing(socket.create_connection((str(address), port), SOCKET_TIMEOUT)) as plain,
                attempt.watched(plain),
            ):
                connection = http.client.HTTPConnection(host, port, timeout=SOCKET_TIMEOUT)
                secure = parts.scheme == "https"
                connection.sock = (
                    ssl.create_default_context().wrap_socket(plain, server_hostname=host) if secure else plain
                )
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
                with closing(connection.getresponse()) as response:
                    location = response.headers.get("location")
                    if response.status in REDIRECTS and location:
                        return urljoin(url, location)
                    return self._read(response)
        except (OSError, http.client.HTTPException, ValueError):
            raise FetchRefused(f"cannot be fetched from {host}") from None

    def _checked(self, url: str) -> SplitResult:
        """Refuses a URL that parsers may interpret differently, or whose host is not on the list."""
        try:
            parts = urlsplit(url)
            port_is_fine = parts.port != 0
        except ValueError:
            raise FetchRefused("has an invalid URL") from None
        odd = not url.isascii() or not url.isprintable() or any(letter in url for letter in "\\ @")
        if odd or not parts.hostname or not port_is_fine or parts.scheme not in ("http", "https"):
            raise FetchRefused(
                "has an invalid URL: a host is required; user names, backslashes and spaces are not allowed"
            )
        if _normalized(parts.hostname) not in self._hosts:
            raise FetchRefused(
                "is on a host that is not allowed; send it as a data: URI, or allow the host with --image-url-allow"
            )
        return parts

    def _address(self, host: str, port: int) -> Address:
        """The first address of the host, if all of them are allowed."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise FetchRefused(f"cannot be fetched: {host} cannot be resolved") from None
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        if not addresses or not all(map(self._may_call, addresses)):
            raise FetchRefused(f"cannot be fetched: {host} does not have a public address")
        return addresses[0]

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        if response.status != 200:
            raise FetchRefused(f"cannot be fetched: the server responded with status {response.status}")
        if (response.length or 0) > self._max_bytes:
            raise FetchRefused(f"is larger than {self._max_bytes} bytes")
        data = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            data += chunk
            if len(data) > self._max_bytes:
                raise FetchRefused(f"is larger than {self._max_bytes} bytes")
        return bytes(data)


def _normalized(host: str) -> str:
    return host.strip().rstrip(".").lower()
