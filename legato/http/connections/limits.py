"""Limits of a connection before authentication: bytes, headers, seconds, file descriptors."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from legato.api.errors import RequestError
from legato.http.connections.lingering_close import MAX_LINGERING

# Descriptors that are not connections: the link, listeners, files, template and grammar processes, fetched images, and
# connections that are being closed to make room.
RESERVED_DESCRIPTORS = 96
# More connections than that in one worker are an attack or a missing load balancer, whatever the descriptors allow.
MAX_CONNECTIONS = 16_384
# One in so many descriptors may be a connection that lingers after its last answer.
LINGERING_SHARE = 8


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    # Request line, headers and trailers together.
    header_bytes: int = 64 * 1024
    num_headers: int = 100
    # Seconds from the first byte of a request, or from the start of a connection, to the end of the headers.
    header_seconds: float = 10.0
    # A body of n bytes may take `body_seconds + n / body_rate` seconds: whoever sends steadily has all the time it
    # takes, whoever sends a byte now and then has no more than ten seconds.
    body_seconds: float = 10.0
    body_rate: float = 4096.0
    # Bytes of all incomplete bodies together; a few bodies of the longest kind always fit.
    incomplete_bytes: int = 24 << 20
    max_connections: int = MAX_CONNECTIONS
    max_lingering: int = MAX_LINGERING

    @classmethod
    def of_process(cls) -> ConnectionLimits:
        """Below the number of files that this process may open."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            return cls()
        lingering = min(MAX_LINGERING, descriptors // LINGERING_SHARE)
        connections = max(1, descriptors - lingering - RESERVED_DESCRIPTORS)
        return cls(max_connections=min(MAX_CONNECTIONS, connections), max_lingering=max(1, lingering))


class RefusedByServer(RequestError):
    """Refused before any route sees the request."""


class RequestTooSlow(RefusedByServer):
    status, error_type = 408, "timeout"


class SeveralHosts(RefusedByServer):
    status, error_type = 400, "validation"

    def __init__(self) -> None:
        super().__init__("The request has more than one Host header; exactly one is expected")


class UriTooLong(RefusedByServer):
    status, error_type = 414, "validation"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request line is longer than the limit of {limit} bytes")


class HeadersTooLarge(RefusedByServer):
    status, error_type = 431, "validation"

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__(f"The headers exceed the limit of {limits.header_bytes} bytes or {limits.num_headers} headers")
