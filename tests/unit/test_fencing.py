"""Who is ended and who is held when an engine stays suspect."""

from __future__ import annotations

import pytest

from kvmanager.daemon.attach import ProcessLife
from kvmanager.daemon.fencing import Fence
from kvmanager.daemon.membership import Membership, Registration
from kvmanager.protos import kvmanager_pb2 as pb


class Machine:
    """Processes by token, and an engine "e" of a scheduler and two ranks in processes of their own."""

    def __init__(self, action: str) -> None:
        self.lives = {f"rank-{rank}": ProcessLife(100 + rank, inherited=False) for rank in range(2)}
        self.lives["scheduler"] = ProcessLife(99, inherited=False)
        self.killed: list[str] = []
        self.membership = Membership(lambda _: None, lambda _: 0, lambda *_: None, lambda _: None)
        self.fence = Fence(action, self.membership, self)
        self.register(1, "scheduler", ("rank-0", "rank-1"))

    def register(self, epoch: int, scheduler: str, ranks: tuple[str, ...]) -> None:
        self.membership.registered("e", epoch, Registration(scheduler, "g", pb.Namespace()))
        for rank, token in enumerate(ranks):
            self.membership.attached("e", epoch, 10 * epoch + rank, token)

    def life_of(self, token: str) -> ProcessLife | None:
        return self.lives.get(token)

    def kill(self, token: str) -> bool:
        self.killed.append(token)
        return True


ENGINE = ("e", 1)


@pytest.fixture
def killing() -> Machine:
    return Machine("kill")


def test_every_process_is_ended(killing: Machine) -> None:
    killing.fence.apply(ENGINE, [])
    assert killing.killed == ["scheduler", "rank-0", "rank-1"]
    assert killing.fence.done(ENGINE) == "kill"
    killing.fence.forget(ENGINE)
    assert killing.fence.done(ENGINE) == "hold"


def test_hold_ends_nobody_and_says_who_lives() -> None:
    machine = Machine("hold")
    machine.fence.apply(ENGINE, [])
    assert machine.killed == []
    assert machine.fence.holders(ENGINE) == "pid 99, 100, 101 lives"


def test_what_is_gone_detached_or_inherited_is_not_signalled(killing: Machine) -> None:
    del killing.lives["scheduler"]
    killing.lives["rank-0"] = ProcessLife(100, inherited=True)
    killing.membership.rank_ended(11)
    killing.fence.apply(ENGINE, [])
    assert killing.killed == []
    assert killing.fence.holders(ENGINE) == "pid 100 is dead, but a child that it forked lives"


def test_a_process_of_a_trusted_epoch_is_spared_whatever_token_it_has(killing: Machine) -> None:
    killing.lives["again"] = ProcessLife(101, inherited=False)
    killing.register(2, "newer", ("again",))
    killing.fence.apply(ENGINE, [("e", 2)])
    assert killing.killed == ["scheduler", "rank-0"]


def test_a_live_stream_is_never_ended_but_one_that_is_not_read_is(killing: Machine) -> None:
    killing.membership.stream_opened(*ENGINE)
    killing.fence.apply(ENGINE, [])
    assert killing.killed == []
    assert killing.fence.done(ENGINE) == "hold"
    killing.membership.stalled(*ENGINE)
    killing.fence.apply(ENGINE, [])
    assert len(killing.killed) == 3
    killing.killed.clear()
    killing.membership.stream_opened(*ENGINE)
    killing.fence.apply(ENGINE, [])
    assert killing.killed == []
    killing.membership.stream_ended(*ENGINE)
    killing.membership.stream_ended(*ENGINE)
    killing.fence.apply(ENGINE, [])
    assert len(killing.killed) == 3


def test_an_engine_that_is_gone_is_nobody(killing: Machine) -> None:
    killing.fence.apply(("e", 7), [])
    assert killing.killed == []
    assert killing.fence.holders(("e", 7)) == ""


def test_a_rank_that_stands_still_is_ended_alone_also_behind_a_live_stream(killing: Machine) -> None:
    killing.membership.stream_opened(*ENGINE)
    assert killing.fence.holders(ENGINE, (11,)) == "pid 101 stands still while work waits for it"
    killing.fence.apply(ENGINE, [], (11, 99))
    assert killing.killed == ["rank-1"]
    assert killing.fence.done(ENGINE) == "kill"


def test_a_rank_that_stands_still_in_a_process_of_a_trusted_epoch_is_spared(killing: Machine) -> None:
    killing.lives["again"] = ProcessLife(101, inherited=False)
    killing.register(2, "newer", ("again",))
    killing.fence.apply(ENGINE, [("e", 2)], (11,))
    assert killing.killed == []
