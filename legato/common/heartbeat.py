"""A pipe on which a child process shows every second that its event loop runs.

The launcher makes the pipe and names the end that is written to in a variable. Without the variable nobody watches.
"""

from __future__ import annotations

import asyncio
import os

VARIABLE = "LEGATO_HEARTBEAT_FD"
BEAT_SECONDS = 1.0
BEAT = b"\n"


async def send_heartbeats() -> None:
    """For ever, to whoever started this process."""
    fd = os.environ.pop(VARIABLE, None)
    if fd is None:
        return
    os.set_blocking(int(fd), False)
    while True:
        try:
            os.write(int(fd), BEAT)
        except BlockingIOError:  # the launcher does not read just now
            pass
        except BrokenPipeError:
            return
        await asyncio.sleep(BEAT_SECONDS)
