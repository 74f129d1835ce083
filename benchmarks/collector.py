"""An OTLP collector that counts bytes and reads none of them, in a process of its own: it should take no part in what
is measured."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import grpc

from legato.common.sockets import free_port

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class CountingCollector:
    def __init__(self) -> None:
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        context = multiprocessing.get_context("spawn")
        self._count = context.Value("q")
        self._process = context.Process(target=_serve, args=(port, self._count), daemon=True)
        self._process.start()

    @property
    def num_bytes(self) -> int:
        return int(self._count.value)

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, count: Synchronized[int]) -> None:
        self._count = count

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._export) if handler_call_details.method == EXPORT else None

    def _export(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._count.get_lock():
            self._count.value += len(request)
        return b""


def _serve(port: int, count: Synchronized[int]) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((_Handler(count),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()
