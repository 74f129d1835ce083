"""Exports spans to the collector with a bounded queue and a thread. Adding spans never blocks.

Only this module imports OpenTelemetry, and only when `--otlp-endpoint` is set.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from legato import __version__
from legato.telemetry.tracing import Attribute, Span

logger = logging.getLogger(__name__)

# Spans that wait while the collector is slow; some 10 MB.
MAX_QUEUED = 8192
MAX_BATCH = 512
# Seconds to wait for more spans before a batch goes out, and for the collector to take one.
PATIENCE = 1.0
TIMEOUT = 5.0
# Seconds between two lines in the log about spans that are lost.
WARNING_INTERVAL = 60.0

# Sends spans; False if the collector did not take them. May wait for as long as it likes.
Send = Callable[[Sequence[Span]], bool]


class SpanExport:
    def __init__(self, send: Send, max_queued: int = MAX_QUEUED) -> None:
        self._send = send
        self._max_queued = max_queued
        self._queue: deque[Span] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._exported = 0
        self._dropped = 0
        self._warned_at = -WARNING_INTERVAL
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, spans: Sequence[Span]) -> None:
        """All or none, so that no trace has holes. Never waits."""
        with self._changed:
            if len(self._queue) + len(spans) > self._max_queued:
                self._dropped += len(spans)
                return
            self._queue.extend(spans)
            if len(self._queue) >= MAX_BATCH:
                self._changed.notify()

    def take_counts(self) -> tuple[int, int]:
        """Spans exported and dropped since the last call."""
        with self._changed:
            counts = self._exported, self._dropped
            self._exported = self._dropped = 0
            return counts

    def close(self, seconds: float) -> None:
        """Send what is left, for so many seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                taken = self._send(batch)
            except Exception:  # whatever a collector answers, serving goes on
                logger.debug("Spans could not be exported", exc_info=True)
                taken = False
            with self._changed:
                if taken:
                    self._exported += len(batch)
                else:
                    self._dropped += len(batch)
            if not taken:
                self._warn()

    def _next_batch(self) -> list[Span]:
        """Empty at the end."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait(PATIENCE)
            if len(self._queue) < MAX_BATCH and not self._closing:
                self._changed.wait(PATIENCE)
            return [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARNING_INTERVAL:
            self._warned_at = now
            logger.warning(
                "The collector (--otlp-endpoint) does not accept spans: they are dropped; requests are not affected"
            )


def open_export(endpoint: str, service_name: str, process: str) -> SpanExport:
    """`process` says which of the processes of one service it is: `http_worker`, `shard-0`."""
    return SpanExport(_otlp(endpoint, service_name, process))


def _otlp(endpoint: str, service_name: str, process: str) -> Send:
    from legato.telemetry.otel import OtlpExporter

    # It logs every attempt. What matters is in our log, once a minute, and in the metrics.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    resource: dict[str, Attribute] = {
        "service.name": service_name,
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        "telemetry.sdk.language": "python",
        "legato.process": process,
    }
    return OtlpExporter(endpoint, resource, TIMEOUT).send
