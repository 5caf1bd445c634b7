"""A process that has loaded the daemon's program and waits to be the daemon.

    python -m kvmanager.spare FD MODULE ARGUMENT...

Loading is most of what a restart costs. It is done here while a daemon serves, in a thread of low priority.
Then the process says so on the keeper's socket FD and waits. It holds no memory and no descriptor of a node, and
ends when that socket does. Once the keeper sends it the daemon's lock and channel, it answers and goes on as
`python -m MODULE ARGUMENT... --keeper-fd N`: in place, or by execve when a file of what it loaded is not the same
any more, so that old code never serves in the place of new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Final

from kvmanager.errors import PeerUnreachable
from kvmanager.exitcodes import EXIT_FAILED, EXIT_OK
from kvmanager.framing import receive_json, send_json
from kvmanager.killpoints import reach

Stamps = dict[str, tuple[int, int, int]]
"""Path -> inode, time of its last change by the kernel's clock (ns), bytes."""
_PR_SET_PDEATHSIG: Final = 1
_CHANGED_LATELY_NS: Final = 20_000_000
"""The clock that stamps files may be so far behind."""
LOAD_NICENESS: Final = 10
"""Of the loading thread: low, yet it gets on where engines keep every core busy (SCHED_IDLE took over 45 s there)."""
_log = logging.getLogger("kvmanager.spare")


class LoadedProgram:
    """A module, all that it imported, and the files that this came from."""

    def __init__(self, name: str) -> None:
        """Imports it, in a thread of low priority. Raises what the import raises."""
        self._began_ns = time.time_ns()
        self.module = _imported(name)
        self._stamps = stamps_of(_files())

    @property
    def current(self) -> bool:
        """Whether what lies on disk is what was loaded: no file has changed since the import began."""
        newest = max(changed for _, changed, _ in self._stamps.values())
        if newest >= self._began_ns - _CHANGED_LATELY_NS:
            return False
        try:
            return stamps_of(self._stamps) == self._stamps
        except OSError:
            return False


def _imported(name: str) -> ModuleType:
    found: list[ModuleType | BaseException] = []

    def load() -> None:
        try:
            with contextlib.suppress(OSError):  # of this thread alone: a priority once given up is not given back
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOAD_NICENESS)
            found.append(importlib.import_module(name))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=load, name="load")
    thread.start()
    thread.join()
    if isinstance(found[0], ModuleType):
        return found[0]
    raise found[0]


def _files() -> list[str]:
    """Files of all modules that are loaded, and the interpreter."""
    named = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [sys.executable, *(path for path in named if path is not None)]


def stamps_of(paths: Sequence[str] | Stamps) -> Stamps:
    """What tells whether they change. Raises OSError for one that is not there."""
    stats = {path: os.stat(path) for path in paths}
    return {path: (stat.st_ino, stat.st_ctime_ns, stat.st_size) for path, stat in stats.items()}


def main(arguments: Sequence[str]) -> int:
    """Loads, waits, and is the daemon; the daemon's exit code, or 0 when it was not needed."""
    fd, name, *others = arguments
    _die_with_keeper(signal.SIGKILL)  # also while it loads, when it can't see its socket end
    with socket.socket(fileno=int(fd)) as keeper:
        keeper.set_inheritable(False)
        program = LoadedProgram(name)
        gc.collect()
        gc.freeze()  # what was loaded stays: no collection need look at it again
        reach("spare.ready")
        try:
            send_json(keeper, {"ready": os.getpid()})
            message, fds = receive_json(keeper)
            _die_with_keeper(0)  # a daemon outlives it
            reach("spare.begins")
            send_json(keeper, {"begins": os.getpid()})
        except PeerUnreachable:
            return EXIT_OK
    if message != {"op": "begin"} or len(fds) != 2:
        print(f"the spare was sent {message} and {len(fds)} descriptors; it is no daemon's beginning", file=sys.stderr)
        return EXIT_FAILED
    return _begin(program, name, others, *fds)


def _die_with_keeper(number: int) -> None:
    """The signal that the kernel sends this process when its parent, the keeper, dies; 0: none."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _begin(program: LoadedProgram, name: str, arguments: Sequence[str], lock: int, channel: int) -> int:
    """`lock` stays open until the process ends; nobody else needs its number."""
    command = [*arguments, "--keeper-fd", str(channel)]
    if not program.current:
        for each in (lock, channel):
            os.set_inheritable(each, True)
        os.execv(sys.executable, [sys.executable, "-m", name, *command])
    sys.argv[:] = [str(program.module.__file__), *command]
    code: int = program.module.main(command)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
