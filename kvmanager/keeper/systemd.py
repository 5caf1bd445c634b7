"""What a service tells systemd, and the descriptors that systemd keeps for it (sd_notify(3), sd_listen_fds(3)).

Everything is a datagram to the socket that NOTIFY_SOCKET names; without the variable nothing is said. A unit
for the keeper: `Type=notify`, `FileDescriptorStoreMax=1024`, `Restart=on-failure`, `RestartPreventExitStatus=78`.
With `KillMode=process` daemon and movers outlive the keeper, otherwise systemd ends them and the store is what is left.
"""

from __future__ import annotations

import array
import logging
import os
import re
import signal
import socket
import time
from collections.abc import MutableMapping, Sequence
from typing import Final, Protocol

from kvmanager.keeper.deposits import Deposit

_FIRST_FD: Final = 3
_VARIABLES: Final = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "LISTEN_PIDFDID"
)  # fmt: skip
_STORED: Final = re.compile(r"([\w.-]+);(\d+)", re.ASCII)
_log = logging.getLogger("kvmanager.keeper")


def without_systemd(environment: MutableMapping[str, str]) -> MutableMapping[str, str]:
    """Takes out what is meant for the service's main process only; the same mapping."""
    for name in _VARIABLES:
        environment.pop(name, None)
    return environment


def stored_deposits(environment: MutableMapping[str, str]) -> list[Deposit]:
    """What systemd kept of a former life of this service; the variables are used up.

    Descriptors that another stored or that come from socket activation are closed, and said.
    """
    meant = environment.get("LISTEN_PID") == str(os.getpid())
    count = int(environment.pop("LISTEN_FDS", "0")) if meant else 0
    names = environment.pop("LISTEN_FDNAMES", "").split(":") if meant else []
    deposits = []
    for fd, name in zip(range(_FIRST_FD, _FIRST_FD + count), names + [""] * count, strict=False):
        match = _STORED.fullmatch(name)
        if match is None:
            _log.warning("systemd passed a descriptor called %r: not one of ours, closed", name)
            os.close(fd)
            continue
        os.set_inheritable(fd, False)
        deposits.append(Deposit(match[1], int(match[2]), fd))
    return deposits


class Watched(Protocol):
    """The daemon's process; pid is 0 while there is none."""

    pid: int

    def tell(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        ...


class Systemd:
    """The service manager above this process, or nobody. It failing to listen never fails us."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Reads NOTIFY_SOCKET (a path, or `@` and an abstract name), WATCHDOG_USEC and WATCHDOG_PID."""
        address = environment.get("NOTIFY_SOCKET")
        self._address = None if address is None else "\0" + address[1:] if address[0:1] == "@" else address
        self._period_s: float | None = None
        if "WATCHDOG_USEC" in environment and environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            self._period_s = int(environment["WATCHDOG_USEC"]) / 2e6  # half of what systemd waits, as it advises
        self._next_s = time.monotonic()
        self._aborted = 0  # pid of a daemon that stood still

    def say(self, *assignments: str, fds: Sequence[int] = ()) -> None:
        """Sends `NAME=value` lines in one datagram, with descriptors."""
        if self._address is None:
            return
        message = "\n".join(assignments).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(1.0)
                # Python 3.11's socket.send_fds leaves the address out.
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                sock.sendmsg([message], rights, 0, self._address)
        except OSError as error:
            _log.warning("systemd did not hear %r: %s", assignments[0], error)

    def keep(self, deposit: Deposit) -> None:
        """Stores the descriptor there as well, so it outlives this process."""
        self.say("FDSTORE=1", f"FDNAME={_name(deposit)}", "FDPOLL=0", fds=[deposit.fd])

    def let_go(self, deposit: Deposit) -> None:
        """Takes it out again."""
        self.say("FDSTOREREMOVE=1", f"FDNAME={_name(deposit)}")

    def watchdog(self, daemon: Watched, alive: tuple[float, float] | None) -> float | None:
        """Says that we live, if it is time and the daemon makes progress; when (monotonic, s) to call again, or never.

        One that stands still is aborted once: it would outlive the keeper that systemd ends in its stead. `alive`: when
        (monotonic) it last said that it makes progress, and how often it does (s); None while it has not come so far.
        """
        if self._period_s is None:
            return None
        now = time.monotonic()
        if now < self._next_s:
            return self._next_s
        self._next_s = now + self._period_s
        silent_s = 0.0 if alive is None or not daemon.pid else now - alive[0]
        if alive is None or silent_s <= max(self._period_s, 2 * alive[1]):
            self.say("WATCHDOG=1")
        elif self._aborted != daemon.pid:
            self._aborted = daemon.pid
            _log.error("the daemon, pid %d, makes no progress for %.1f s: aborting it", daemon.pid, silent_s)
            self.say(f"STATUS=the daemon made no progress for {silent_s:.0f} s and was aborted")
            daemon.tell(signal.SIGABRT)
        return self._next_s


def _name(deposit: Deposit) -> str:
    return f"{deposit.name};{deposit.size_bytes}"
