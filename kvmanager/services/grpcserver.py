"""The daemon's gRPC server: how many calls at once, how large, and how soon a silent client is noticed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvmanager.configuration.sections import FenceSection
from kvmanager.errors import ConfigError
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.services.parsing import Parser
from kvmanager.wire import MESSAGE_MAX_BYTES

STREAM_THREADS: Final = 64
"""Concurrent calls; each open session holds one."""


def grpc_server(fence: FenceSection, *interceptors: grpc.ServerInterceptor[Any, Any]) -> grpc.Server:
    """Without services and ports yet."""
    return grpc.server(
        ThreadPoolExecutor(max_workers=STREAM_THREADS, thread_name_prefix="grpc"),
        interceptors=[*interceptors, Parser()],
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


_ADD: Final[dict[str, Callable[[Any, grpc.Server], None]]] = {
    "Engine": pb_grpc.add_EngineServicer_to_server,
    "Worker": pb_grpc.add_WorkerServicer_to_server,
    "Peer": pb_grpc.add_PeerServicer_to_server,
    "Admin": pb_grpc.add_AdminServicer_to_server,
    "Operator": pb_grpc.add_OperatorServicer_to_server,
}


def serve_all(server: grpc.Server, socket_path: Path, services: dict[str, Any], health_: health.HealthServicer) -> None:
    """Adds every service of the contract, health and reflection, on the node's own socket. Raises ConfigError."""
    for name in pb.DESCRIPTOR.services_by_name:
        _ADD[name](services[name], server)
    health_pb2_grpc.add_HealthServicer_to_server(health_, server)
    named = [service.full_name for service in pb.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection([*named, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    socket_path.unlink(missing_ok=True)
    if server.add_insecure_port(f"unix:{socket_path}") == 0:
        raise ConfigError(f"can't listen on {socket_path}; choose another runtime_dir")
