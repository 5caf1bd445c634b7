"""The keeper: the small parent that starts, restarts and stops a node's daemon and mover.

It holds the descriptors of all memory (`kvmanager.deposits`), so a daemon that died comes back to the
same bytes. It loads the standard library only: no gRPC, no torch, no numpy, no CUDA. In this version
its own end is the node's end: its children get SIGKILL from the kernel when it dies.

    run: mover, daemon --(death)--> restart with back-off, at most 5 in 60 s, then exit 1
                       --(daemon exits 0 or 78)--> stop, exit with that code
                       --(SIGTERM, SIGINT)--> stop, exit 0
    stop: SIGTERM to the daemon, which drains; then to the mover. SIGKILL to what outlasts its deadline,
          or on a second signal.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from kvmanager.deposits import DepositBox
from kvmanager.errors import ConfigError, KVError
from kvmanager.killpoints import reach
from kvmanager.runtime_dir import make_private_dir

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 78
"""As in sysexits.h; a daemon that exits with it is not restarted."""

_PR_SET_PDEATHSIG: Final = 1
_ANSWER_TIMEOUT_S: Final = 5.0
_CLOSE_S: Final = 20.0
_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger("kvmanager.keeper")


@dataclass(frozen=True, slots=True)
class KeeperLimits:
    """Times in seconds. `restarts_max` restarts of one child within `restart_window_s`; one more ends the node."""

    drain_s: float = 30.0
    mover_stop_s: float = 5.0
    restarts_max: int = 5
    restart_window_s: float = 60.0
    backoff_first_s: float = 0.1


@dataclass(eq=False, slots=True)
class _Child:
    """A program that shall run. `process` and `pidfd` are set while it does, `restart_at_s` while it waits."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    restart_at_s: float | None = None
    deaths_s: deque[float] = field(default_factory=deque)


class Keeper:
    """One node's parent process. `--keeper-fd N` is appended to the daemon's command.

    Use it in the main thread of a process of its own: it takes over SIGTERM and SIGINT.
    """

    def __init__(
        self,
        daemon_command: Sequence[str],
        mover_command: Sequence[str],
        limits: KeeperLimits,
    ) -> None:
        self._daemon_command = tuple(daemon_command)
        self._mover_command = tuple(mover_command)
        self._limits = limits
        self._daemon = _Child("daemon", self._start_daemon)
        self._mover = _Child("mover", self._start_mover)
        self._box = DepositBox()
        self._channel: socket.socket | None = None  # to the daemon, while it keeps its end open
        self._selector = selectors.DefaultSelector()
        self._signals = 0
        self._exit_code: int | None = None  # set once: why the node stops

    def run(self) -> int:
        """Runs the node until it ends; the exit code."""
        wake_source, wake_target = socket.socketpair()
        for end in (wake_source, wake_target):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_source.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._selector.register(wake_target, selectors.EVENT_READ, lambda: wake_target.recv(4096))
        children = (self._daemon, self._mover)
        try:
            self._launch(self._mover)
            self._launch(self._daemon)
            while self._exit_code is None:
                self._turn(min((c.restart_at_s for c in children if c.restart_at_s is not None), default=None))
                for child in children:
                    if self._exit_code is None and child.restart_at_s is not None:
                        self._restart_when_due(child)
            self._stop(self._daemon, self._limits.drain_s)
            self._stop(self._mover, self._limits.mover_stop_s)
        finally:
            for child in children:
                self._kill(child)
            self._box.close()
        return self._exit_code

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        _log.info("%s: stopping", signal.Signals(number).name)
        if self._exit_code is None:
            self._exit_code = EXIT_OK

    def _turn(self, until_s: float | None) -> None:
        """Handles what happens next; returns at `until_s` (monotonic) at the latest."""
        timeout = None if until_s is None else max(0.0, until_s - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()

    # -------------------------------------------------------------------------------- starting

    def _start_mover(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._mover_command, preexec_fn=_die_with(os.getpid()), process_group=0)

    def _start_daemon(self) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        with theirs:
            command = (*self._daemon_command, "--keeper-fd", str(theirs.fileno()))
            process = subprocess.Popen(
                command, preexec_fn=_die_with(os.getpid()), process_group=0, pass_fds=[theirs.fileno()]
            )
        ours.settimeout(_ANSWER_TIMEOUT_S)
        self._box.new_daemon()
        self._channel = ours
        self._selector.register(ours, selectors.EVENT_READ, self._serve_daemon)
        return process

    def _launch(self, child: _Child) -> None:
        child.restart_at_s = None
        child.process = child.start()
        reach("keeper.start_child")
        child.pidfd = os.pidfd_open(child.process.pid)
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._on_death(child))
        _log.info("started the %s, pid %d", child.name, child.process.pid)

    def _restart_when_due(self, child: _Child) -> None:
        if child.restart_at_s is not None and time.monotonic() >= child.restart_at_s:
            self._launch(child)

    # ------------------------------------------------------------------------------- listening

    def _serve_daemon(self) -> None:
        if self._channel is None:  # closed by a death that was handled earlier in this turn
            return
        try:
            more = self._box.serve(self._channel)
        except KVError as error:
            _log.error("the daemon's channel is closed: %s", error)
            more = False
        if not more:
            self._close_channel()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None

    def _on_death(self, child: _Child) -> None:
        if child.process is None:  # reaped by `_kill` earlier in this turn
            return
        code = self._reap(child)
        if self._exit_code is not None:
            return
        if child is self._daemon and code in (EXIT_OK, EXIT_CONFIG):
            self._exit_code = code
            return
        now = time.monotonic()
        deaths = child.deaths_s
        deaths.append(now)
        while now - deaths[0] > self._limits.restart_window_s:
            deaths.popleft()
        if len(deaths) > self._limits.restarts_max:
            _log.error(
                "the %s died %d times in %g s; giving up", child.name, len(deaths), self._limits.restart_window_s
            )
            self._exit_code = EXIT_FAILED
            return
        delay = self._limits.backoff_first_s * 2 ** (len(deaths) - 1)
        child.restart_at_s = now + delay
        _log.warning("the %s ended with %d; restart in %g s, %d deposits kept", child.name, code, delay, len(self._box))

    def _reap(self, child: _Child) -> int:
        assert child.process is not None, f"the {child.name} is reaped once"
        code = child.process.wait()
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        child.process = None
        if child is self._daemon:
            self._close_channel()
        return code

    # -------------------------------------------------------------------------------- stopping

    def _stop(self, child: _Child, patience_s: float) -> None:
        """SIGTERM, then SIGKILL after `patience_s` or at the next signal to the keeper."""
        if child.process is None:
            return
        deadline = time.monotonic() + patience_s
        signals = self._signals
        child.process.send_signal(signal.SIGTERM)
        while child.process is not None and time.monotonic() < deadline and self._signals == signals:
            self._turn(deadline)
        if child.process is None:
            _log.info("the %s stopped, %.1f s", child.name, patience_s - (deadline - time.monotonic()))
        else:
            _log.error("the %s did not stop within %g s; killing it", child.name, patience_s)
            self._kill(child)

    def _kill(self, child: _Child) -> None:
        if child.process is not None:
            child.process.kill()
            self._reap(child)


def _die_with(keeper_pid: int) -> Callable[[], None]:
    """Runs in a child before exec: SIGKILL when the keeper dies."""

    def prepare() -> None:
        if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != keeper_pid:
            os._exit(EXIT_FAILED)

    return prepare


def main(arguments: Sequence[str]) -> int:
    """`python -m kvmanager.keeper`: what `kvmanager serve` becomes. The daemon checks the configuration itself."""
    parser = argparse.ArgumentParser(prog="kvmanager.keeper", description="Keeps a node's daemon and mover running.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--drain-ms", type=int, default=10_000, help="how long the daemon drains on SIGTERM")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper: %(message)s", stream=sys.stderr)
    try:
        make_private_dir(options.runtime_dir)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    python = (sys.executable, "-m")
    daemon_command = (*python, "kvmanager.daemon", "--config", str(options.config))
    mover_command = (
        *python, "kvmanager.mover", "--runtime-dir", str(options.runtime_dir), "--device", options.device
    )  # fmt: skip
    # What the daemon needs after its drain, to close streams and memory.
    limits = KeeperLimits(drain_s=options.drain_ms / 1000 + _CLOSE_S)
    return Keeper(daemon_command, mover_command, limits).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
