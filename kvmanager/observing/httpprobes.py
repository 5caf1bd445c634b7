"""/metrics, /healthz and /readyz over HTTP.

GET only; a request line and headers of at most 8 KiB; `AT_ONCE` requests at one time, more get 503; a client has
`PATIENCE_S` to say what it wants. Nothing can be changed here. Who may connect: whoever has a certificate of the node's
CA; on a unix socket of mode 0600, the node's own user; on a loopback address without TLS (`plain_loopback`), everybody
on this machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final

from prometheus_client import CollectorRegistry, exposition

from kvmanager.configuration.operationsconfig import UNIX
from kvmanager.errors import ConfigError

AT_ONCE: Final = 8
PATIENCE_S: Final = 10.0
Tls = Callable[[], ssl.SSLContext] | None
_log = logging.getLogger("kvmanager.http")


class HttpProbes:
    """Serves until `close`. `alive()`, `problems()` and `late()` are asked at each probe."""

    def __init__(
        self,
        listen: str,
        registry: CollectorRegistry,
        alive: Callable[[], bool],
        problems: Callable[[], dict[str, str]],
        late: Callable[[], dict[str, str]],
        tls: Tls = None,
    ) -> None:
        """`tls()`: what the next TCP client must pass. Raises ConfigError when it can't listen there."""
        self._tls = tls
        self._registry = registry
        self._alive = alive
        self._problems = problems
        self._late = late
        self._path = Path(listen.removeprefix(UNIX)) if listen.startswith(UNIX) else None
        try:
            self._server = self._bind(listen)
        except OSError as error:
            raise ConfigError(f"[metrics] listen: can't listen on {listen}: {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)

    def _bind(self, listen: str) -> _Server:
        answer = self._answer

        class Handler(_Handler):
            answers = staticmethod(answer)

        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            server = _Server(socket.AF_UNIX, str(self._path), Handler)
            os.chmod(self._path, 0o600)
            return server
        host, _, port = listen.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        return _Server(family, (host.strip("[]"), int(port)), Handler, self._tls)

    @property
    def address(self) -> Any:
        """Where it listens: (address, port, ...), or a path."""
        return self._server.server_address

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()
        _log.info("metrics and probes on %s", self._path or "{}:{}".format(*self.address[:2]))

    def close(self) -> None:
        """Stops listening."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        plain = "text/plain; charset=utf-8"
        if path == "/metrics":
            encode, kind = exposition.choose_encoder(accept)
            return 200, kind, encode(self._registry)
        if path == "/healthz":
            alive = self._alive()
            return (200, plain, b"alive\n") if alive else (503, plain, b"the core does not answer\n")
        if path == "/readyz":
            problems = self._problems()
            text = "" if problems else "ready\n"
            text += "".join(f"{part}: {why}\n" for part, why in (problems | self._late()).items())
            return 503 if problems else 200, plain, text.encode()
        return 404, plain, b"/metrics, /healthz or /readyz\n"


class _Server(ThreadingMixIn, TCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(
        self,
        family: socket.AddressFamily,
        address: Any,
        handler: type[BaseHTTPRequestHandler],
        tls: Tls = None,
    ) -> None:
        self.address_family = family
        self._tls = tls
        self._places = threading.Semaphore(AT_ONCE)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, while there are places."""
        if not self._places.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.0 503 Busy\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Over TLS where it must be; a client that does not pass is gone with it."""
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(PATIENCE_S)
        with self._tls().wrap_socket(request, server_side=True) as secure:
            super().finish_request(secure, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection, one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A client that broke off is nobody's trouble."""
        _log.debug("an HTTP request broke off", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE_S
    server_version = "kvmanager"
    sys_version = ""
    answers: Callable[[str, str], tuple[int, str, bytes]]

    def do_GET(self) -> None:
        """Answers."""
        status, kind, body = self.answers(self.path.partition("?")[0], self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        """A unix socket has no address."""
        return str(self.client_address)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Scrapes are not news."""
        _log.debug(format, *arguments)
