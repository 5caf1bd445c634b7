"""The keeper: the small parent that starts, restarts and stops a node's daemon and movers.

It holds the descriptors of all memory (`deposits`), so a daemon that died comes back to the same bytes.
It loads the standard library only: no gRPC, no torch, no numpy, no CUDA.

    run: movers, daemon --(death)--> restart with back-off, at most 5 in 60 s, then exit 1
                        --(daemon exits 0, or 78 when nothing was ever served)--> stop, exit with that code
                        --(daemon exits 78: it can't go on with what is held)--> hold it and wait, status says why
                        --(SIGTERM, SIGINT)--> stop, exit 0
                        --(SIGHUP)--> passed on to the daemon, once it serves: it reads its file again
                        --(SIGUSR2)--> the program that is installed now takes over in this process (execve)
    stop: SIGTERM to the daemon, which drains; then to the movers. SIGKILL to what is late, or on a second signal.

Its own death costs nothing. The children live on; the next keeper on the same runtime directory finds them by
their lock files, has the daemon give everything back over its 0700 directory's `keeper.sock`, and goes on. Where
systemd keeps descriptors, they are there too. When the daemon died as well and nothing was kept, the start is cold:
it says so, and SIGKILLs the movers of the life before, waiting for their end, before it starts anything.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvmanager.errors import ConfigError, DaemonError, NotReady
from kvmanager.exitcodes import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_REPLACED
from kvmanager.keeper import handover, refusal
from kvmanager.keeper.children import Child, KeeperLimits, hold_runtime_dir, kill_orphans
from kvmanager.keeper.daemonchannel import DaemonChannel
from kvmanager.keeper.deposits import SERVING, Deposit, DepositBox
from kvmanager.keeper.keepersignals import KeeperSignals
from kvmanager.keeper.sparechild import SpareChild
from kvmanager.keeper.systemd import Systemd, stored_deposits, without_systemd
from kvmanager.runtime_dir import KEEPER_LOCK, make_private_dir

_CLOSE_S: Final = 20.0  # what the daemon needs after its drain, to close streams and memory
_log = logging.getLogger("kvmanager.keeper")


class Keeper:
    """One node's parent process. `--keeper-fd N` is appended to the daemon's command.

    Use it in the main thread of a process of its own: it takes over the signals of `keepersignals`.
    """

    def __init__(
        self,
        runtime_dir: Path,
        daemon_command: Sequence[str],
        mover_commands: Mapping[str, Sequence[str]],
        limits: KeeperLimits,
        *,
        spare_command: Sequence[str] = (),
        cold: bool = False,
    ) -> None:
        """`mover_commands`: by name; names are those of the lock files, too. `cold`: what systemd kept is let go."""
        self._runtime_dir = runtime_dir
        self._limits = limits
        self._cold = cold
        self._daemon = Child("daemon", daemon_command, runtime_dir)
        self._movers = [Child(name, command, runtime_dir) for name, command in mover_commands.items()]
        self._children = (*self._movers, self._daemon)
        self._before = handover.take_over(os.environ)  # of all descriptors, before there are others
        handover.close_on_exec()
        self._systemd = Systemd(os.environ)
        self._box = DepositBox(self._systemd, self._on_state)
        self._selector = selectors.DefaultSelector()
        self._channel = DaemonChannel(runtime_dir, self._box, self._selector)
        self._spare = SpareChild(spare_command, runtime_dir, limits, self._selector)
        self._lock = -1
        self._signals = KeeperSignals(self._on_stop)
        self._exit_code: int | None = None  # set once: why the node stops

    def run(self) -> int:
        """Runs the node until it ends; the exit code.

        Raises ConfigError when a living keeper has the directory already, NotReady when something of the life
        before neither answers nor dies. Children live on after any exception.
        """
        self._signals.listen(self._selector)
        if self._before is None:
            self._find_what_runs()
        else:
            self._restore(self._before)
        for child in self._children:
            if child.running:
                self._watch(child)
            elif child.restart_at_s is None:
                self._launch(child)
        while self._exit_code is None:
            self._turn(self._due_s())
            self._do_what_is_due()
        self._systemd.say("STOPPING=1", "STATUS=stopping")
        self._spare.end()
        self._stop(self._daemon, self._limits.drain_s)
        for mover in self._movers:
            self._stop(mover, self._limits.mover_stop_s)
        if self._exit_code == EXIT_OK:  # otherwise what systemd has waits for a start that can use it
            self._box.close()  # the last who holds it: the kernel takes the memory back here, in about 0.1 s a GiB
        for child in self._children:
            child.forget()
        refusal.clear(self._runtime_dir)
        (self._runtime_dir / KEEPER_LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        return self._exit_code

    def _on_stop(self) -> None:
        self._exit_code = self._exit_code or EXIT_OK

    def _turn(self, until_s: float | None) -> None:
        """Handles what happens next; returns at `until_s` (monotonic) at the latest."""
        timeout = None if until_s is None else max(0.0, until_s - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()

    def _due_s(self) -> float | None:
        times = [self._channel.connect_at_s] if self._daemon.running else []
        times += [self._spare.start_at_s, self._systemd.watchdog(self._daemon, self._box.alive)]
        times += [child.restart_at_s for child in self._children]
        return min((t for t in times if t is not None), default=None)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._daemon.running:
            self._channel.connect_if_due(now)
        for child in self._children:
            if self._exit_code is None and child.restart_at_s is not None and now >= child.restart_at_s:
                self._launch(child)
        self._spare.start_if_due(now)
        if self._daemon.running and self._box.daemon_state == SERVING and self._signals.take_reload():
            self._daemon.tell(signal.SIGHUP)
        if self._signals.upgrade_asked and self._exit_code is None and self._box.between_frames:
            self._signals.upgrade_asked = False
            self._upgrade()

    # -------------------------------------------------------------------------------- beginning

    def _find_what_runs(self) -> None:
        """Takes over from the keeper before, from systemd, or from nobody."""
        self._lock = hold_runtime_dir(self._runtime_dir)
        self._box.take_back(stored_deposits(os.environ))
        if self._cold:
            self._box.close()
        unclean = any(child.was_there() for child in self._children)
        if self._daemon.find():
            _log.info("found the daemon, pid %d: it gives its memory's descriptors back", self._daemon.pid)
        elif len(self._box):
            _log.info("%d descriptors came back from systemd", len(self._box))
        elif unclean:
            self._start_over()
        for mover in self._movers:
            mover.find()

    def _start_over(self) -> None:  # nothing of the life before may run when memory is given out anew
        killed = ", ".join(kill_orphans(self._runtime_dir)) or "nothing"
        _log.warning("keeper and daemon died: cold start, the cache is lost; killed what was left: %s", killed)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._lock, self._box.daemon_state = state["lock"], state.get("daemon_state", "")
        self._box.take_back([Deposit(*entry) for entry in state["deposits"]])
        for child in self._children:
            child.restore(state["children"][child.name])
        if state["channel"] >= 0:
            self._channel.use(socket.socket(fileno=state["channel"]))
        _log.info("upgraded in place: pid %d, %d deposits", os.getpid(), len(self._box))

    def _upgrade(self) -> None:
        """Becomes the installed program, once that is known to start. Returns when it can't: this one goes on."""
        self._spare.end()  # it has loaded the old program, and nobody would reap it
        deposits = self._box.deposits()
        state = {
            "lock": self._lock, "channel": self._channel.fd,
            "deposits": [[deposit.name, deposit.size_bytes, deposit.fd] for deposit in deposits],
            "children": {child.name: child.state() for child in self._children},
            "daemon_state": self._box.daemon_state,
        }
        fds = [self._lock, self._channel.fd, *(d.fd for d in deposits), *(c.pidfd for c in self._children)]
        self._signals.hold_back()
        try:
            handover.hand_over("kvmanager.keeper", state, [fd for fd in fds if fd >= 0])
        except OSError as error:
            self._signals.let_through()
            self._spare.plan()
            _log.error("no upgrade, the old keeper goes on: %s", error)

    def _launch(self, child: Child) -> None:
        environment = without_systemd(dict(os.environ))
        try:
            if child is self._daemon:
                refusal.clear(self._runtime_dir)
                with self._channel.pair() as theirs:
                    if not self._spare.stand_in(child, theirs):
                        child.start(environment, [theirs.fileno()], ("--keeper-fd", str(theirs.fileno())))
            else:
                child.start(environment)
        except NotReady as error:
            if child is self._daemon:
                self._channel.drain()
            self._plan_restart(child, str(error))
        else:
            self._watch(child)
            _log.info("started the %s, pid %d", child.name, child.pid)

    def _watch(self, child: Child) -> None:
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._on_death(child))

    def _on_state(self, state: str) -> None:
        self._systemd.say(*(["READY=1"] if state == SERVING else []), f"STATUS=the daemon is {state}")
        if state == SERVING:
            self._spare.plan()

    def _on_death(self, child: Child) -> None:
        if not child.running:  # reaped by `_kill` earlier in this turn
            return
        code = self._reap(child)
        if self._exit_code is not None:
            return
        if child is self._daemon and code == EXIT_CONFIG and self._box.warm:
            self._systemd.say(f"STATUS={refusal.leave(self._runtime_dir, self._box.daemon_state)}")
        elif child is self._daemon and code in (EXIT_OK, EXIT_CONFIG):
            self._exit_code = code
        elif child is self._daemon and code == EXIT_REPLACED:
            self._spare.end()
            child.restart_at_s = time.monotonic()
        else:
            if child is self._daemon and code is None and not len(self._box):
                self._start_over()  # it was found, and died before it had given anything back
            self._plan_restart(child, f"the {child.name} " + ("ended" if code is None else f"ended with {code}"))

    def _plan_restart(self, child: Child, story: str) -> None:
        delay_s = child.note_death(self._limits)
        if delay_s is None:
            story += f": death {len(child.deaths_s)} in {self._limits.restart_window_s:g} s; giving up"
            self._exit_code = EXIT_FAILED
        else:
            story += f"; restart in {delay_s:g} s, {len(self._box)} deposits kept"
        _log.warning("%s", story)
        self._systemd.say(f"STATUS={story}")

    def _reap(self, child: Child) -> int | None:
        """The exit code, as far as it can be known."""
        self._selector.unregister(child.pidfd)
        code = child.reap()
        if child is self._daemon:
            self._channel.drain()
            code = self._box.exit_code if code is None else code
        return code

    def _stop(self, child: Child, patience_s: float) -> None:
        """SIGTERM, then SIGKILL after `patience_s` or at the next signal to the keeper."""
        if not child.running:
            return
        deadline = time.monotonic() + patience_s
        stops = self._signals.stops
        child.tell(signal.SIGTERM)
        while child.running and time.monotonic() < deadline and self._signals.stops == stops:
            self._turn(deadline)
        if not child.running:
            _log.info("the %s stopped, %.1f s", child.name, patience_s - (deadline - time.monotonic()))
        else:
            _log.error("the %s did not stop within %g s; killing it", child.name, patience_s)
            child.kill()
            self._reap(child)


def main(arguments: Sequence[str]) -> int:
    """`python -m kvmanager.keeper`: what `kvmanager serve` becomes. The daemon checks the configuration itself."""
    parser = argparse.ArgumentParser(prog="kvmanager.keeper", description="Keeps a node's daemon and movers running.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--device", required=True, action="append", help="one mover for each")
    parser.add_argument("--drain-ms", type=int, default=10_000, help="how long the daemon drains on SIGTERM")
    parser.add_argument("--restart-window-s", type=float, default=60.0, help="at most 5 deaths of a child within it")
    parser.add_argument("--spare", action="store_true", help="keep a process ready that takes a dead daemon's place")
    parser.add_argument("--mover", action="append", default=[], help="an argument of all movers")
    parser.add_argument("--cold", action="store_true", help="give up memory that was kept")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper: %(message)s", stream=sys.stderr)
    python, runtime_dir = (sys.executable, "-m"), options.runtime_dir
    daemon = (*python, "kvmanager.daemon", "--config", str(options.config))
    mover = (*python, "kvmanager.mover", "--runtime-dir", str(runtime_dir), *options.mover, "--device")
    movers = {f"mover-{device}": (*mover, device) for device in options.device}
    spare = (*python, "kvmanager.keeper.spare", "kvmanager.daemon.__main__", *daemon[3:]) if options.spare else ()
    limits = KeeperLimits(options.drain_ms / 1000 + _CLOSE_S, restart_window_s=options.restart_window_s)
    try:
        make_private_dir(runtime_dir)
        return Keeper(runtime_dir, daemon, movers, limits, spare_command=spare, cold=options.cold).run()
    except (ConfigError, DaemonError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
