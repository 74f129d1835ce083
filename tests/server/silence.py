"""A stream on which nobody says anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from legato.pb import generate_pb2 as pb


async def silence() -> AsyncIterator[pb.StepRequest]:
    """For streams that are refused. If a request is on its way then, gRPC's client may take that for an error of its
    own, once in 1,500 times, and that is what it tells."""
    await asyncio.Event().wait()
    yield pb.StepRequest()
