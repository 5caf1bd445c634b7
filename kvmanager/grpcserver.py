"""The daemon's gRPC server: how many calls at once, how large, and how soon a silent client is noticed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from kvmanager.config import FenceSection
from kvmanager.wire import MESSAGE_MAX_BYTES

STREAM_THREADS: Final = 64
"""Concurrent calls; each open session holds one."""


def grpc_server(fence: FenceSection, interceptor: grpc.ServerInterceptor[Any, Any]) -> grpc.Server:
    """Without services and ports yet."""
    return grpc.server(
        ThreadPoolExecutor(max_workers=STREAM_THREADS, thread_name_prefix="grpc"),
        interceptors=[interceptor],
        # More are refused with RESOURCE_EXHAUSTED; without the limit they would wait for a thread, unanswered.
        maximum_concurrent_rpcs=STREAM_THREADS,
        options=[
            ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
            ("grpc.max_send_message_length", MESSAGE_MAX_BYTES),
            ("grpc.so_reuseport", 0),
            # A client that does not answer pings is stopped or hung; one that is only idle answers them.
            ("grpc.keepalive_time_ms", fence.ping_ms),
            ("grpc.keepalive_timeout_ms", fence.silence_ms),
            ("grpc.http2.ping_timeout_ms", fence.silence_ms),  # the one that counts in gRPC 1.84; 60 s by default
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ],
    )
