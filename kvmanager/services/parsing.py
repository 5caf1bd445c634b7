"""Messages that are none: a typed error instead of gRPC's INTERNAL and a traceback in the log for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvmanager.errors import InvalidArgument
from kvmanager.wire import abort_with

T = TypeVar("T")


class Parser(grpc.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """Reads messages itself, just before the method does. What is none raises InvalidArgument."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's handler, given bytes."""
        handler = continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        read = handler.request_deserializer
        if handler.unary_unary is not None:
            inner = handler.unary_unary

            def unary(data: bytes, context: grpc.ServicerContext) -> Any:
                try:
                    message = read_message(read, data)
                except InvalidArgument as error:
                    abort_with(context, error)
                return inner(message, context)

            return grpc.unary_unary_rpc_method_handler(unary, None, handler.response_serializer)
        if handler.stream_stream is not None:
            many = handler.stream_stream

            def stream(items: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
                return many((read_message(read, data) for data in items), context)

            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return handler


def read_message(read: Callable[[bytes], T], data: bytes, what: str = "message of this call") -> T:
    """The message `what` that the bytes are. Raises InvalidArgument for what is none."""
    try:
        return read(data)
    except DecodeError as error:
        raise InvalidArgument(f"{len(data)} bytes are no {what}: {error}") from None
