"""The route guide service: one class, one method per RPC, as in Legato's `server/service.py`.

The shape of a method follows from the proto: a message in is an argument, a stream in is an async iterator;
a message out is returned, a stream out is yielded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import route_guide_pb2 as pb
import route_guide_pb2_grpc as rpc
from island import contains, is_on_earth, metres_between, place

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
NOTES_PER_FEATURE = 8  # older ones are dropped, so that memory stays bounded


class RouteGuide(rpc.RouteGuideServicer):
    def __init__(self, features: list[pb.Feature]) -> None:
        self.features = {place(feature.location): feature for feature in features}
        self.notes = {where: deque[pb.RouteNote](maxlen=NOTES_PER_FEATURE) for where in self.features}
        self.num_chats = 0

    async def GetFeature(self, request: pb.Point, context: Context) -> pb.Feature:
        return await self._feature_at(request, context)

    async def ListFeatures(self, request: pb.Rectangle, context: Context) -> AsyncIterator[pb.Feature]:
        for feature in self.features.values():
            if contains(request, feature.location):
                yield feature

    async def RecordRoute(self, request_iterator: AsyncIterator[pb.Point], context: Context) -> pb.RouteSummary:
        summary, metres, start = pb.RouteSummary(), 0.0, time.monotonic()
        last: pb.Point | None = None
        async for point in request_iterator:
            await self._require_on_earth(point, context)
            summary.num_points += 1
            summary.num_features += place(point) in self.features
            metres += metres_between(last or point, point)
            last = point
        summary.metres, summary.seconds = round(metres), time.monotonic() - start
        return summary

    async def RouteChat(
        self, request_iterator: AsyncIterator[pb.RouteNote], context: Context
    ) -> AsyncIterator[pb.RouteNote]:
        """If the caller cancels or its deadline passes, the next await raises CancelledError. Resources are released
        in `finally`, as Legato's Tokens releases the shard."""
        self.num_chats += 1
        try:
            async for note in request_iterator:
                feature = await self._feature_at(note.location, context)
                board = self.notes[place(feature.location)]
                for earlier in tuple(board):  # a copy: other calls may append while this one waits
                    yield earlier
                board.append(note)
        finally:
            self.num_chats -= 1

    async def _feature_at(self, point: pb.Point, context: Context) -> pb.Feature:
        await self._require_on_earth(point, context)
        if feature := self.features.get(place(point)):
            return feature
        await context.abort(grpc.StatusCode.NOT_FOUND, f"the map shows nothing at {place(point)}")

    async def _require_on_earth(self, point: pb.Point, context: Context) -> None:
        """`abort` raises and ends the call with a status, so callers need not check the result."""
        if not is_on_earth(point):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{place(point)} is no latitude and longitude")
