"""The shard's side of `benchmarks/transport.py`: a device that only takes time, behind each of the transports."""

from __future__ import annotations

import asyncio
import queue
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from legato.pb import generate_pb2 as pb

UNARY, STREAM = "/unary/Step", "/stream/Steps"
REQUEST, RESPONSE = pb.StepRequest, pb.StepResponse
LENGTH = struct.Struct("<I")
# Rows of a step -> seconds that it takes: one stream and 256 on an H200 (8B model), 16 on two CPU cores (135M model).
PACES = {1: 3.8e-3, 256: 10e-3, 16: 30e-3}


class Device:
    """Steps one after the other, each as long as its number of rows says. Counts how long it had nothing to do.
    A step without rows asks for the counters."""

    def __init__(self, paced: bool) -> None:
        self._paced = paced
        self._busy_until: float | None = None
        self._idle = 0.0

    def launch(self, request: pb.StepRequest) -> tuple[pb.StepRequest, float]:
        now = time.perf_counter()
        if not request.rows:
            return request, now
        if self._busy_until is not None:
            self._idle += max(0.0, now - self._busy_until)
        began = max(now, self._busy_until or now)
        self._busy_until = began + (PACES[len(request.rows)] if self._paced else 0.0)
        return request, self._busy_until

    def read(self, launched: tuple[pb.StepRequest, float]) -> pb.StepResponse:
        """`total_ns` says when the step ended; of a question it says the CPU time, and `forward_ns` the idle time."""
        request, due = launched
        if not request.rows:
            idle, self._idle, self._busy_until = self._idle, 0.0, None
            return RESPONSE(total_ns=time.process_time_ns(), forward_ns=int(idle * 1e9))
        if (delay := due - time.perf_counter()) > 0:
            time.sleep(delay)
        rows = len(request.rows)
        return RESPONSE(id=request.id, token_ids=[1234] * rows, logprobs=[-0.5] * rows, total_ns=int(due * 1e9))


# ---- one function per transport -------------------------------------------------------------------------------------


def _method(name: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.GenericRpcHandler:
    _, service, method = name.split("/")
    return grpc.method_handlers_generic_handler(service, {method: handler})


def _codec() -> dict[str, Any]:
    return {"request_deserializer": REQUEST.FromString, "response_serializer": RESPONSE.SerializeToString}


def serve_sync(path: str, device: Device) -> None:
    """gRPC with threads: unary calls, and a stream whose steps are launched by a thread of their own."""

    def step(request: pb.StepRequest, context: object) -> pb.StepResponse:
        return device.read(device.launch(request))

    def steps(requests: Iterator[pb.StepRequest], context: object) -> Iterator[pb.StepResponse]:
        launched: queue.SimpleQueue[tuple[pb.StepRequest, float]] = queue.SimpleQueue()

        def feed() -> None:
            for request in requests:
                launched.put(device.launch(request))

        threading.Thread(target=feed, daemon=True).start()
        while True:
            yield device.read(launched.get())

    server = grpc.server(ThreadPoolExecutor(4))
    unary = grpc.unary_unary_rpc_method_handler(step, **_codec())
    stream = grpc.stream_stream_rpc_method_handler(steps, **_codec())
    server.add_generic_rpc_handlers((_method(UNARY, unary),))
    server.add_generic_rpc_handlers((_method(STREAM, stream),))
    server.add_insecure_port(f"unix://{path}")
    server.start()
    server.wait_for_termination()


def serve_aio(path: str, device: Device) -> None:
    """grpc.aio, with the threads that `server/service.py` has: one launches, one reads."""
    launcher, reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    async def step(request: pb.StepRequest, context: object) -> pb.StepResponse:
        launched = launcher.submit(device.launch, request)
        return await asyncio.get_running_loop().run_in_executor(reader, read, launched)

    def read(launched: Future[tuple[pb.StepRequest, float]]) -> pb.StepResponse:
        return device.read(launched.result())

    async def steps(requests: AsyncIterator[pb.StepRequest], context: object) -> AsyncIterator[pb.StepResponse]:
        answers: asyncio.Queue[asyncio.Future[pb.StepResponse]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def feed() -> None:
            async for request in requests:
                launched = launcher.submit(device.launch, request)
                answers.put_nowait(loop.run_in_executor(reader, read, launched))

        feeder = asyncio.create_task(feed())
        try:
            while True:
                yield await (await answers.get())
        finally:
            feeder.cancel()

    async def run() -> None:
        server = grpc.aio.server()
        unary = grpc.unary_unary_rpc_method_handler(step, **_codec())
        stream = grpc.stream_stream_rpc_method_handler(steps, **_codec())
        server.add_generic_rpc_handlers((_method(UNARY, unary),))
        server.add_generic_rpc_handlers((_method(STREAM, stream),))
        server.add_insecure_port(f"unix://{path}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


def serve_framed(path: str, device: Device) -> None:
    """A plain socket: this thread reads and launches, another waits for the device and writes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    connection, _ = listener.accept()
    launched: queue.SimpleQueue[tuple[pb.StepRequest, float]] = queue.SimpleQueue()

    def answer() -> None:
        while True:
            data = device.read(launched.get()).SerializeToString()
            connection.sendall(LENGTH.pack(len(data)) + data)

    threading.Thread(target=answer, daemon=True).start()
    frames = connection.makefile("rb")
    while head := frames.read(LENGTH.size):
        launched.put(device.launch(REQUEST.FromString(frames.read(LENGTH.unpack(head)[0]))))
