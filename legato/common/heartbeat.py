"""A socket pair between the launcher and a child: the child shows every second that its event loop runs, and hears how
far the start of the other processes has come.

The launcher names the child's end in a variable. Without the variable nobody watches and nobody tells.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress

VARIABLE = "LEGATO_HEARTBEAT_FD"
BEAT_SECONDS = 1.0
BEAT = b"\n"


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
