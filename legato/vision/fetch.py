"""Fetches pictures from the few hosts that the operator allows, and speaks to nobody else.

A URL is a way to make a server call somebody on its own network. So a name must be on the list, all addresses that it
resolves to must be public ones, the connection goes to an address that was checked (a second look-up could say
something else), and a redirect is an error like any other. What is refused is refused before a packet leaves.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import closing
from urllib.parse import SplitResult, urlsplit

from legato.common.errors import LegatoError

# Seconds for one answer of the network, and for the whole picture.
PATIENCE, DEADLINE = 5.0, 15.0
_PIECE = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class FetchRefused(LegatoError):
    """Says why, as the end of a sentence about the picture."""


def is_public(address: Address) -> bool:
    """Also of the address that may be wrapped in another one."""
    if isinstance(address, ipaddress.IPv6Address):
        wrapped = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64:
            wrapped = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if wrapped is not None:
            return is_public(wrapped)
    return address.is_global and not address.is_multicast


class Fetcher:
    """Blocks, so it is called in a thread. `may_call` says which addresses may be called at all."""

    def __init__(self, hosts: tuple[str, ...], max_bytes: int, may_call: Callable[[Address], bool] = is_public) -> None:
        self._hosts = frozenset(_plain(host) for host in hosts)
        self._max_bytes = max_bytes
        self._may_call = may_call

    def fetch(self, url: str) -> bytes:
        parts = self._checked(url)
        host, port = str(parts.hostname), parts.port or {"http": 80, "https": 443}[parts.scheme]
        address = self._address(host, port)
        ends_at = time.monotonic() + DEADLINE
        try:
            with closing(socket.create_connection((str(address), port), PATIENCE)) as plain:
                connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
                secure = parts.scheme == "https"
                connection.sock = (
                    ssl.create_default_context().wrap_socket(plain, server_hostname=host) if secure else plain
                )
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
                with closing(connection.getresponse()) as response:
                    return self._read(response, ends_at)
        except (OSError, http.client.HTTPException, ValueError):
            raise FetchRefused(f"cannot be fetched from {host}") from None

    def _checked(self, url: str) -> SplitResult:
        """A URL that every reader takes for the same one, of a host on the list."""
        try:
            parts = urlsplit(url)
            port_is_fine = parts.port != 0
        except ValueError:
            raise FetchRefused("has a URL that makes no sense") from None
        odd = not url.isascii() or not url.isprintable() or any(letter in url for letter in "\\ @")
        if odd or not parts.hostname or not port_is_fine:
            raise FetchRefused("has a URL that makes no sense, or one with a user, a backslash or a blank in it")
        if _plain(parts.hostname) not in self._hosts:
            raise FetchRefused(
                "is on a host from which nothing is fetched; send it as a data: URI, or have the host allowed with"
                " --image-url-allow"
            )
        return parts

    def _address(self, host: str, port: int) -> Address:
        """One of those that the name stands for, all of which must be fine."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise FetchRefused(f"cannot be fetched: there is no host {host}") from None
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        if not addresses or not all(map(self._may_call, addresses)):
            raise FetchRefused(f"cannot be fetched: {host} is no public address")
        return addresses[0]

    def _read(self, response: http.client.HTTPResponse, ends_at: float) -> bytes:
        if response.status != 200:
            raise FetchRefused(f"cannot be fetched: the answer has the status {response.status}")
        if (response.length or 0) > self._max_bytes:
            raise FetchRefused(f"has more than {self._max_bytes} bytes")
        data = bytearray()
        while piece := response.read1(_PIECE):
            data += piece
            if len(data) > self._max_bytes:
                raise FetchRefused(f"has more than {self._max_bytes} bytes")
            if time.monotonic() > ends_at:
                raise FetchRefused(f"cannot be fetched within {DEADLINE:.0f} seconds")
        return bytes(data)


def _plain(host: str) -> str:
    return host.strip().rstrip(".").lower()
