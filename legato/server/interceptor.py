"""Converts errors of a call to a status with a message and a log line; the shard keeps running."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from legato.common.errors import LegatoError

logger = logging.getLogger(__name__)


class RequestRefused(LegatoError):
    """The call cannot be served; `code` is its gRPC status."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.code = code


class ExceptionInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the unary methods. The step stream reports a failed step in its response and continues."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        call: Any = handler.unary_unary

        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await call(request, context)
            except RequestRefused as error:
                await context.abort(error.code, str(error))
            except LegatoError as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            except Exception as error:
                if isinstance(error, grpc.aio.AbortError):
                    raise
                logger.exception("Method %s failed", method)
                await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")

        return grpc.unary_unary_rpc_method_handler(guarded, handler.request_deserializer, handler.response_serializer)
