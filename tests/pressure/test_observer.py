"""Each invariant can fail: clients and views that lie are found out, and what they did is made smaller and replays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvmanager.clients.engine import RequestStep
from kvmanager.pressure import runner
from kvmanager.pressure.driver import MakeDriver, OwnDriver, Target
from kvmanager.pressure.driverprocess import own_command
from kvmanager.pressure.nodes import Node, own_nodes
from kvmanager.pressure.observer import INVARIANTS, Violation
from kvmanager.pressure.press import Options, Press
from kvmanager.pressure.runner import Runner
from kvmanager.pressure.schedule import Action, Schedule, load
from kvmanager.pressure.views import Views
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import pack_u32, unpack_u32

HERE = Path(__file__).stem
ROOM_TOKENS = 32


def opens(request: int, spans: int, growth: int = 0, piece: int = 0) -> Action:
    text = [[piece or request, spans * ROOM_TOKENS + growth]]
    return Action("open", {"client": 0, "request": request, "text": text, "growth": growth})


SCHEDULE = (
    Action("connect", {"client": 0}),
    opens(1, 3, growth=64),
    opens(2, 3),
    Action("advance", {"client": 0, "request": 1, "to": 120}),
    Action("advance", {"client": 0, "request": 2, "to": 96}),
    Action("close", {"client": 0, "request": 2}),
    opens(3, 4, piece=2),
    Action("poll"),
    Action("poll"),
    Action("poll"),
    Action("poll"),
    opens(4, 23),
    Action("settle"),
)


class GivesPagesTwice(OwnDriver):
    """The second request's first page is the first one's."""

    first = b""

    def step(self, opens: Sequence[pb.OpenRequest], rows: Sequence[RequestStep], closes: Sequence[pb.CloseRequest]):
        reply = super().step(opens, rows, closes)
        for opened in reply.opened:
            for run in opened.spans:
                pages = run.pages[0].device_pages
                if self.first:
                    run.pages[0].device_pages = self.first + pages[4:]
                self.first = self.first or pages[:4]
        return reply


class GivesContentTwice(OwnDriver):
    """All fresh pages have the first one's content id."""

    first = b""

    def step(self, opens: Sequence[pb.OpenRequest], rows: Sequence[RequestStep], closes: Sequence[pb.CloseRequest]):
        reply = super().step(opens, rows, closes)
        for opened in reply.opened:
            for run in opened.spans:
                self.first = self.first or run.uids[:8]
                run.uids = self.first + run.uids[8:]
        return reply


class WritesElsewhere(OwnDriver):
    """One row is not what it says."""

    def write(self, request_id: int, start: int, digests: np.ndarray) -> None:
        digests = digests.copy()
        digests[len(digests) // 2] += 1
        super().write(request_id, start, digests)


class DoesNotGrow(OwnDriver):
    """Growth inside the promise is refused."""

    def step(self, opens: Sequence[pb.OpenRequest], rows: Sequence[RequestStep], closes: Sequence[pb.CloseRequest]):
        reply = super().step(opens, rows, closes)
        for growth in reply.growth:
            growth.error.CopyFrom(pb.Error(reason=pb.EXHAUSTED, message="full", pool="first/hbm", needed=1))
        return reply


class Refuses(OwnDriver):
    """Says no to every request, in some words; the daemon is not asked."""

    error = pb.Error(reason=pb.EXHAUSTED, message="full", pool="first/hbm", needed=3, retry_after_ns=1)

    def step(self, opens: Sequence[pb.OpenRequest], *_):
        refused = [pb.OpenReply(request_id=o.request_id, state=pb.OpenReply.REFUSED, error=self.error) for o in opens]
        return pb.StepReply(opened=refused)


class RefusesForNoPool(Refuses):
    error = pb.Error(reason=pb.EXHAUSTED, message="full", pool="nowhere", needed=3, retry_after_ns=1)


class RefusesWithRoom(Refuses):
    error = pb.Error(reason=pb.EXHAUSTED, message="full", pool="first/hbm", needed=3, free=3, retry_after_ns=1)


class RefusesForEver(Refuses):
    error = pb.Error(reason=pb.EXHAUSTED, message="full", pool="first/hbm", needed=3)


class RefusesTooMuch(Refuses):
    error = pb.Error(reason=pb.EXHAUSTED, message="full", pool="first/hbm", needed=500, retry_after_ns=1)


class RefusesAsDraining(Refuses):
    error = pb.Error(reason=pb.DRAINING, message="no")


class NamesWhoHoldsNothing(Refuses):
    error = pb.Error(
        reason=pb.EXHAUSTED, message="full", pool="first/hbm", needed=3, retry_after_ns=1,
        holder="pressure-9-9/77 (3 pages)",
    )  # fmt: skip


class KillsTheDaemon(OwnDriver):
    """Something else went wrong with it."""

    def write(self, request_id: int, start: int, digests: np.ndarray) -> None:
        super().write(request_id, start, digests)
        if request_id == 2:
            os.kill(int((self._target.runtime_dir / "daemon.lock").read_text()), signal.SIGKILL)


class HoldsMoreThanItSays(Views):
    def pools(self) -> pb.PoolsReply:
        reply = super().pools()
        for pool in reply.pools:
            pool.pinned_bytes = 0
        return reply


class LosesBytes(Views):
    def pools(self) -> pb.PoolsReply:
        reply = super().pools()
        reply.pools[0].free_bytes -= 1
        return reply


class FindsTheLedgerWrong(Views):
    def status(self) -> pb.StatusReply:
        reply = super().status()
        reply.ledger_ok = False
        return reply


class SeesALeak(Views):
    """A pool of which a page never comes back."""

    def leftovers(self, quiet: bool) -> list[str]:
        del quiet
        pools = super().pools()
        pools.pools[0].pinned_bytes += 1
        return [f"{pool.pool} {pool.pinned_bytes}" for pool in pools.pools if pool.pinned_bytes]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with own_nodes("node", "", tmp_path_factory.mktemp("n")) as running:
        yield running


def broken_by(nodes: list[Node], make: MakeDriver, views: type[Views] = Views, revision: str = "") -> Violation:
    for node in nodes:
        node.target = replace(node.target, revision=revision or f"{make}{views}"[-60:])
    with pytest.raises(Violation) as found:
        Runner(nodes, make, own_command("none:none"), make_views=views).run(Schedule("s", 1, "node", SCHEDULE))
    return found.value


SEEN: set[str] = set()


@pytest.mark.parametrize(
    ("make", "invariant"),
    [
        (GivesPagesTwice, "page-twice"),
        (GivesContentTwice, "uid-twice"),
        (WritesElsewhere, "wrong-bytes"),
        (DoesNotGrow, "promise"),
        (Refuses, "progress"),
        (RefusesForNoPool, "refusal"),
        (RefusesWithRoom, "refusal"),
        (RefusesForEver, "refusal"),
        (RefusesTooMuch, "refusal"),
        (RefusesAsDraining, "refusal"),
        (NamesWhoHoldsNothing, "refusal"),
    ],
)
def test_a_client_whose_daemon_does_wrong_is_noticed(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, make: type[OwnDriver], invariant: str
) -> None:
    if invariant == "progress":
        monkeypatch.setattr(runner, "PATIENCE_S", 1.0)
    assert broken_by(nodes, make).invariant == invariant
    SEEN.add(invariant)


@pytest.mark.parametrize(
    ("views", "invariant"),
    [(HoldsMoreThanItSays, "account"), (LosesBytes, "account"), (FindsTheLedgerWrong, "account"), (SeesALeak, "leak")],
)
def test_a_node_whose_account_is_wrong_is_noticed(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, views: type[Views], invariant: str
) -> None:
    if views is SeesALeak:
        monkeypatch.setattr(runner, "PATIENCE_S", 5.0)
    assert broken_by(nodes, OwnDriver, views).invariant == invariant
    SEEN.add(invariant)


def test_the_schedule_itself_holds(nodes: list[Node]) -> None:
    for node in nodes:
        node.target = replace(node.target, revision="holds")
    calm = Runner(nodes, OwnDriver, own_command("none:none"))
    calm.run(Schedule("s", 1, "node", SCHEDULE))
    assert calm.tally.granted >= 4
    assert calm.tally.hits >= 1


def test_a_daemon_that_died_is_noticed_and_every_invariant_was_seen_to_fail(nodes: list[Node]) -> None:
    assert broken_by(nodes, KillsTheDaemon).invariant == "death"
    assert SEEN | {"death"} == set(INVARIANTS)


def driver_of_a_page_twice(target: Target, name: str) -> OwnDriver:
    """For a driver by name."""
    return GivesPagesTwice(target, name)


def test_what_breaks_is_made_smaller_and_the_file_breaks_again(tmp_path: Path) -> None:
    options = Options(driver=f"tests.pressure.{HERE}:driver_of_a_page_twice", save_to=tmp_path, shrink_runs=20)
    with Press(options) as press:
        report = press.replay(Schedule("mine", 5, "no-host", SCHEDULE))
        assert (report.outcome, report.invariant) == ("failed", "page-twice")
        small = load(Path(report.saved))
        assert len(small.actions) == report.smallest <= 4 < len(SCHEDULE)
        again = press.replay(small)
        assert (again.outcome, again.invariant) == ("failed", "page-twice")
    with Press(Options(save_to=tmp_path)) as honest:
        assert honest.replay(small).outcome == "passed"


def test_packed_pages_are_what_the_lies_above_change() -> None:
    assert unpack_u32(pack_u32([7, 9])[:4], "pages").tolist() == [7]
