"""A keeper with stand-in children, as a process of its own: what several tests start and look at."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvmanager.framing import readable
from kvmanager.keeper.children import kill_orphans

WAIT_S = 60.0
KEEPER = """
import logging, sys
from pathlib import Path
from kvmanager.errors import ConfigError, DaemonError
from kvmanager.exitcodes import EXIT_CONFIG
from kvmanager.framing import readable
from kvmanager.keeper.keeper import Keeper, KeeperLimits
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
limits = KeeperLimits(
    drain_s={drain_s}, mover_stop_s={drain_s}, restarts_max=3, backoff_first_s=0.01, spare_after_s=0.02
)
python = (sys.executable, "-c")
spare = (sys.executable, "-m", "kvmanager.keeper.spare", {spare!r}) if {spare!r} else ()
try:
    movers = {{"mover": (*python, {mover!r})}}
    code = Keeper(Path({runtime_dir!r}), (*python, {daemon!r}), movers, limits, spare_command=spare).run()
except ConfigError as error:
    sys.stderr.write(f"error: {{error}}")
    code = EXIT_CONFIG
sys.exit(code)
"""
SAY = """
import os
def print(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
"""Goes before each child's program: a line is one write, for the children share the keeper's pipe."""
MOVER = "import os, time\nprint('mover', os.getpid())\ntime.sleep(600)\n"
"""Says its pid and runs."""
DAEMON = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('daemon drained'), sys.exit(0)))
print('daemon', os.getpid())
time.sleep(600)
"""
LINKED_DAEMON = """
import os, signal, sys, time
from pathlib import Path
from kvmanager.daemon.keeperlink import KeeperLink
from kvmanager.framing import readable
link = KeeperLink(int(sys.argv[2]))
link.listen(Path({runtime_dir!r}))
held = link.reclaim()
print("held", [(d.name, d.size_bytes, os.pread(d.fd, 99, 0).decode()) for d in held])
if not held:
    for name in ("hbm", "host"):
        fd = os.memfd_create(name)
        os.write(fd, f"bytes of {{name}}".encode())
        link.deposit(name, 4096, fd)
def more(*_):
    link.forget("hbm")
    fd = os.memfd_create("journal")
    os.write(fd, b"records")
    link.deposit("journal", 99, fd)
    print("changed")
def stop(*_):
    link.say("draining")
    link.leave(0)
    print("daemon drained")
    os._exit(0)
signal.signal(signal.SIGUSR1, more)
signal.signal(signal.SIGTERM, stop)
link.say("serving")
print("daemon", os.getpid())
while True: signal.pause()
"""
"""Deposits two pieces when it gets none; SIGUSR1: lets one go and deposits another."""


class Lines:
    """The children's output, a line at a time; other children's lines wait."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._stdout = process.stdout
        self._early: list[str] = []

    def next(self, start: str) -> str:
        """The rest of the next line that starts so."""
        for line in self._early:
            if line.startswith(start):
                self._early.remove(line)
                return line.removeprefix(start).strip()
        while line := self._stdout.readline():
            if line.startswith(start):
                return line.removeprefix(start).strip()
            self._early.append(line)
        raise AssertionError(f"the output ended without {start!r}; it had {self._early}")


@contextlib.contextmanager
def keeper(
    runtime_dir: Path,
    daemon: str = DAEMON,
    mover: str = MOVER,
    drain_s: float = 20.0,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    before: str = "",
    spare: str = "",
) -> Iterator[tuple[subprocess.Popen[str], Lines]]:
    """A running keeper, after `before` in the same process; afterwards neither it nor a child of it is left.

    `spare`: the module that its spare loads.
    """
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    children = {"daemon": SAY + daemon, "mover": SAY + mover, "spare": spare}
    script = KEEPER.format(**children, drain_s=drain_s, runtime_dir=str(runtime_dir))
    with subprocess.Popen(
        [sys.executable, "-c", before + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        pass_fds=pass_fds,
    ) as process:

        def end() -> None:
            process.kill()
            process.wait()
            kill_orphans(runtime_dir)

        timer = threading.Timer(WAIT_S, end)  # a test that hangs ends here: nobody holds the pipes any more
        timer.start()
        try:
            yield process, Lines(process)
        finally:
            timer.cancel()
            end()


def said(process: subprocess.Popen[str], text: str) -> str:
    """Reads the keeper's own log up to a line that holds `text`; all of it so far."""
    assert process.stderr is not None
    seen = ""
    while line := process.stderr.readline():
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"the keeper never said {text!r}; it said\n{seen}")


def gone(pidfd: int) -> bool:
    """Waits for the end of a process that we did not start; closes the pidfd."""
    done = bool(readable([pidfd], WAIT_S))
    os.close(pidfd)
    return done


def lives(pid: int) -> bool:
    """Whether the process runs now."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def kill_and_wait(process: subprocess.Popen[str]) -> None:
    """The keeper's sudden death."""
    process.send_signal(signal.SIGKILL)
    process.wait()
