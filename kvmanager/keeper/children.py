"""The keeper's children: started by it, or found running when it came after another keeper.

A child is known by the lock file that it holds (`NAME.lock`, with its pid) and watched by its pidfd, so it need
not be a child in the kernel's sense. Nothing kills it when its keeper dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvmanager.errors import ConfigError, NotReady
from kvmanager.framing import readable
from kvmanager.keeper import lockfile
from kvmanager.killpoints import of_child, reach
from kvmanager.runtime_dir import KEEPER_LOCK

EXIT_NOT_STARTED: Final = 127
"""Of a child whose program could not be executed."""
_SAYS_ITS_PID_S: Final = 2.0
_DIES_S: Final = 10.0
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ)


@dataclass(frozen=True, slots=True)
class KeeperLimits:
    """Times in seconds. `restarts_max` restarts of one child within `restart_window_s`; one more ends the node.

    A first death is made good at once, the next ones after `backoff_first_s`, doubled each time.
    """

    drain_s: float = 30.0
    mover_stop_s: float = 5.0
    restarts_max: int = 5
    restart_window_s: float = 60.0
    backoff_first_s: float = 0.1
    spare_after_s: float = 1.0


class Child:
    """One program that shall run. `pid` and `pidfd` are set while it does, `restart_at_s` while it waits to."""

    def __init__(self, name: str, command: Sequence[str], runtime_dir: Path) -> None:
        self.name = name
        self.pid = 0
        self.pidfd = -1
        self.restart_at_s: float | None = None
        self.deaths_s: deque[float] = deque()
        self._command = tuple(command)
        self._lock_path = runtime_dir / f"{name}.lock"

    @property
    def running(self) -> bool:
        """Whether it was started or found, and not reaped since."""
        return self.pid != 0

    def start(self, environment: Mapping[str, str], fds: Sequence[int] = (), arguments: Sequence[str] = ()) -> None:
        """Starts it in a process group of its own; it inherits `fds`. Raises NotReady while another one lives.

        A kill point is armed in the first process only, unless its order lies in a file.
        """
        armed = of_child(environment, first=not self.deaths_s)
        with self._locked() as lock:
            self.pid = spawn((*self._command, *arguments), armed, fds, lock)
        reach("keeper.start_child")
        self.pidfd = os.pidfd_open(self.pid)
        self.restart_at_s = None

    def become(self, pid: int, pidfd: int, give: Callable[[int], None]) -> None:
        """A process that was started before is this child once `give(lock)` has given it the lock.

        Raises NotReady while another one lives, and what `give` raises; then nothing has changed.
        """
        with self._locked() as lock:
            lockfile.name_holder(lock, pid)
            give(lock)
        reach("keeper.spare_begins")
        self.pid, self.pidfd, self.restart_at_s = pid, pidfd, None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The lock, for the child to inherit; ours is closed afterwards."""
        lock = lockfile.hold(self._lock_path)
        if lock is None:
            raise NotReady(f"something that the {self.name} before has started still runs: {self._lock_path} is held")
        try:
            yield lock
        finally:
            os.close(lock)

    def find(self) -> bool:
        """Takes one that runs already under its wing; False when there is none. Raises NotReady."""
        found = _running(self._lock_path)
        if found is None:
            return False
        self.pid, self.pidfd = found
        return True

    def was_there(self) -> bool:
        """Whether a node that ran here did not end in order."""
        return self._lock_path.exists()

    def tell(self, number: signal.Signals) -> None:
        """Sends a signal; one that has ended is not missed."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int | None:
        """After its end: the exit code, negative for a signal; None when it was another process's child."""
        code = None
        with contextlib.suppress(ChildProcessError):
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            assert result is not None, "a wait without WNOHANG has a result"
            code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        os.close(self.pidfd)
        self.pid, self.pidfd = 0, -1
        return code

    def kill(self) -> None:
        """SIGKILL, and waits for the end; not reaped yet. Raises NotReady when the kernel does not let go of it."""
        self.tell(signal.SIGKILL)
        _await_end(self.pid, self.pidfd)

    def note_death(self, limits: KeeperLimits) -> float | None:
        """Plans its restart, later after each death within the window; the delay in s, None when it died too often."""
        now = time.monotonic()
        self.deaths_s.append(now)
        while now - self.deaths_s[0] > limits.restart_window_s:
            self.deaths_s.popleft()
        if len(self.deaths_s) > limits.restarts_max:
            return None
        delay = limits.backoff_first_s * 2.0 ** (len(self.deaths_s) - 2) if len(self.deaths_s) > 1 else 0.0
        self.restart_at_s = now + delay
        return delay

    def forget(self) -> None:
        """Takes its lock file away: an orderly end leaves none."""
        self._lock_path.unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        """What the keeper's next program must know; `pidfd` must be inherited."""
        return {
            "pid": self.pid, "pidfd": self.pidfd, "restart_at_s": self.restart_at_s, "deaths_s": list(self.deaths_s)
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, in the same process."""
        self.pid, self.pidfd, self.restart_at_s = state["pid"], state["pidfd"], state["restart_at_s"]
        self.deaths_s = deque(state["deaths_s"])


def hold_runtime_dir(runtime_dir: Path) -> int:
    """Makes this process the keeper of a directory; its lock. Raises ConfigError while another one is."""
    path = runtime_dir / KEEPER_LOCK
    lock = lockfile.hold(path)
    if lock is None:
        raise ConfigError(
            f"a keeper, pid {lockfile.holder(path)}, has {runtime_dir} already; "
            "stop it or choose another runtime_dir"
        )
    lockfile.name_holder(lock, os.getpid())
    return lock


def kill_orphans(runtime_dir: Path) -> list[str]:
    """SIGKILLs what a dead keeper left running in `runtime_dir` and waits for its end; the names of what was.

    Nothing while another keeper lives there. Raises NotReady for what does not die.
    """
    killed: list[str] = []
    if lockfile.holder(runtime_dir / KEEPER_LOCK) not in (None, os.getpid()):
        return killed
    for path in sorted(runtime_dir.glob("*.lock")):
        found = _running(path) if path.name != KEEPER_LOCK else None
        if found is not None:
            pid, pidfd = found
            try:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                _await_end(pid, pidfd)
            finally:
                os.close(pidfd)
            killed.append(path.stem)
    return killed


def _running(lock_path: Path) -> tuple[int, int] | None:
    """(pid, pidfd) of the process that holds the lock; None when nobody does. Raises NotReady."""
    give_up = time.monotonic() + _SAYS_ITS_PID_S
    while (pid := lockfile.holder(lock_path)) is not None:
        if pid:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                pidfd = -1
            # The lock is still held, so its holder lived all the while and the pid was its own.
            if pidfd >= 0 and lockfile.holder(lock_path) == pid:
                return pid, pidfd
            if pidfd >= 0:
                os.close(pidfd)
        if time.monotonic() > give_up:
            raise NotReady(f"somebody holds {lock_path} and does not say who; try again, or end it by hand")
        time.sleep(0.01)
    return None


def _await_end(pid: int, pidfd: int) -> None:
    if not readable([pidfd], _DIES_S):
        raise NotReady(f"process {pid} does not die within {_DIES_S} s of SIGKILL: the kernel holds it")


def spawn(command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int], lock: int = -1) -> int:
    """Forks and executes, in a process group of its own; the new process's id.

    `fds` and `lock`, if there is one, are inherited. The keeper has one thread, so the child may run Python.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # our handlers must not run in the child
    try:
        pid = os.fork()
        if pid == 0:
            _become(command, environment, fds, lock)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return pid


def _become(command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int], lock: int) -> None:
    try:
        if lock >= 0:
            lockfile.name_holder(lock, os.getpid())
            fds = (*fds, lock)
        os.setpgid(0, 0)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for fd in fds:
            os.set_inheritable(fd, True)
        os.execvpe(command[0], [*command], environment)
    except OSError as error:
        os.write(2, f"can't run {command[0]}: {error}\n".encode())
    finally:
        os._exit(EXIT_NOT_STARTED)
