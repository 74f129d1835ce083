"""A socket pair between the launcher and a child. The launcher names the child's end in a variable; without it nobody
watches and nobody tells.

The router shows every second that its event loop runs, and hears how far the start of the shards has come. A shard
shows that it gets on while it loads and warms up, and says when that is done: then the router watches its steps.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress

VARIABLE = "LEGATO_HEARTBEAT_FD"
BEAT_SECONDS = 1.0
BEAT = b"\n"
DONE = "done"


async def send_heartbeats(on_stage: Callable[[str, float], None]) -> None:
    """For ever, to whoever started this process. `on_stage` gets the stage of the start and its progress, 0 to 1."""
    fd = int(os.environ.pop(VARIABLE, "-1"))
    if fd < 0:
        return
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, _read_stages, fd, on_stage)
    try:
        while True:
            with suppress(BlockingIOError):  # the launcher does not read just now
                os.write(fd, BEAT)
            await asyncio.sleep(BEAT_SECONDS)
    except BrokenPipeError:
        return
    finally:
        loop.remove_reader(fd)


class LoadingReports:
    """A shard's. `advance` may be called for every tensor: a beat a second is sent at most."""

    def __init__(self) -> None:
        self._fd = int(os.environ.pop(VARIABLE, "-1"))
        self._sent_at = -BEAT_SECONDS
        if self._fd >= 0:
            os.set_blocking(self._fd, False)

    def advance(self) -> None:
        """Something was loaded, computed or compiled."""
        now = time.monotonic()
        if now - self._sent_at >= BEAT_SECONDS:
            self._sent_at = now
            self._send(BEAT)

    def done(self) -> None:
        """Until the next `advance` nothing is loaded."""
        self._sent_at = -BEAT_SECONDS
        self._send(DONE.encode() + BEAT)

    def _send(self, line: bytes) -> None:
        if self._fd >= 0:
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(self._fd, line)


def stage_line(stage: str, progress: float) -> bytes:
    return json.dumps([stage, progress]).encode() + b"\n"


def _read_stages(fd: int, on_stage: Callable[[str, float], None]) -> None:
    """Lines are shorter than what a socket writes and reads at once."""
    received = os.read(fd, 1 << 16)
    if not received:  # the launcher is gone
        asyncio.get_running_loop().remove_reader(fd)
    for line in received.splitlines():
        stage, progress = json.loads(line)
        on_stage(stage, progress)
