"""What is done about an engine that is suspect for too long, while its processes may still touch memory.

Mapped memory can't be taken from a live process. So either its processes are ended, or what it holds is held on:
`[fence] action`. Suspect means that its stream broke, or that it does not read what it is sent, or that its process
answers no sign of life (`ping_ms`, `silence_ms`): pings are answered by the reader thread of its session
(`sessionframes.py`), or by its gRPC threads, so a stopped process does not answer and an idle one does; nor does one
whose session goes over frames while it holds Python's lock all that time.

Behind a live stream a rank that is stopped or hangs is known by its timeline, which stands still while a fence waits
for it (`stall_ms`): its process is ended or held. What hangs while no work waits for it can't be told from what is
idle, and is never ended; nor is an engine with a live stream that is suspect for another reason, a lost rank, say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvmanager.daemon.attach import ProcessLife
from kvmanager.daemon.membership import EngineKey, Membership

_log = logging.getLogger("kvmanager.fence")


class Processes(Protocol):
    """Attached processes by token (`AttachServer`)."""

    def life_of(self, token: str) -> ProcessLife | None:
        """None when it is gone."""
        ...

    def kill(self, token: str) -> bool:
        """SIGKILL; False when that can't be done."""
        ...


class Fence:
    """Ends or holds engines, and says who holds what. Thread-safe; nothing here blocks."""

    def __init__(self, action: str, membership: Membership, processes: Processes) -> None:
        """`action`: "kill" or "hold"."""
        self._act: Callable[[EngineKey, Iterable[str], set[int]], bool]
        self.use(action)
        self._membership = membership
        self._processes = processes
        self._killed: set[EngineKey] = set()

    def use(self, action: str) -> None:
        """What is done from now on."""
        self._act = {"kill": self._kill, "hold": self._hold}[action]

    def done(self, engine: EngineKey) -> str:
        """What `apply` did about an engine last: "kill", or "hold" where nothing was ended."""
        return "kill" if engine in self._killed else "hold"

    def forget(self, engine: EngineKey) -> None:
        """It is gone."""
        self._killed.discard(engine)

    def apply(self, engine: EngineKey, trusted: Iterable[EngineKey], stalled: Sequence[int] = ()) -> None:
        """The engine has been suspect for too long. A process that also serves a trusted epoch is never ended.

        `stalled`: attach ids of ranks that stand still; only these ranks' processes are to be ended then.
        """
        if not stalled and self._membership.has_live_stream(*engine):
            _log.warning("engine %s epoch %d stays suspect, but its stream is live: it is not ended", *engine)
            return
        spared = {life.pid for key in trusted for life in self._lives(self._membership.processes(*key))}
        tokens = self._membership.workers(stalled) if stalled else self._membership.processes(*engine)
        if self._act(engine, tokens, spared):
            self._killed.add(engine)
        holders = self.holders(engine, stalled)
        _log.warning("engine %s epoch %d stays suspect; its pages are held: %s", *engine, holders)

    def _hold(self, engine: EngineKey, tokens: Iterable[str], spared: set[int]) -> bool:  # noqa: ARG002
        return False

    def _kill(self, engine: EngineKey, tokens: Iterable[str], spared: set[int]) -> bool:
        """Whether any process was ended."""
        killed = False
        for token in tokens:
            life = self._processes.life_of(token)
            if life is None or life.inherited:
                continue
            if life.pid in spared:
                _log.warning("engine %s epoch %d: pid %d serves a newer epoch and is left alone", *engine, life.pid)
            elif self._processes.kill(token):
                _log.warning("engine %s epoch %d stays suspect: killed pid %d", *engine, life.pid)
                killed = True
        return killed

    def holders(self, engine: EngineKey, stalled: Sequence[int] = ()) -> str:
        """What a suspect engine's pages wait for, in words; empty when nothing of it is left."""
        if stalled:
            pids = sorted({life.pid for life in self._lives(self._membership.workers(stalled))})
            return f"pid {', '.join(map(str, pids))} stands still while work waits for it" if pids else ""
        lives = {life.pid: life for life in self._lives(self._membership.processes(*engine))}
        alive = sorted(pid for pid, life in lives.items() if not life.inherited)
        orphans = sorted(pid for pid, life in lives.items() if life.inherited)
        parts = []
        if alive:
            parts.append(f"pid {', '.join(map(str, alive))} lives")
        if orphans:
            parts.append(f"pid {', '.join(map(str, orphans))} is dead, but a child that it forked lives")
        return "; ".join(parts)

    def _lives(self, tokens: Iterable[str]) -> list[ProcessLife]:
        lives = (self._processes.life_of(token) for token in tokens)
        return [life for life in lives if life is not None]
