"""Numbered steps over streams that break: the same number gets the same reply, once."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from nodes_support import (
    GROUP,
    SPAN,
    Node,
    check_filled,
    device_pages,
    fill,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    run_request,
    tokens_of,
    wait_for,
)

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.clients.sessionstream import StreamEnd
from kvmanager.errors import InvalidArgument, Suspect
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import error_from_rpc


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("sessions"), "prefill", prefill_toml, pages=64) as running:
        yield running


@pytest.fixture
def engine(served: Node) -> Iterator[AttachedEngine]:
    made = prefill_engine(served.runtime_dir)
    yield made
    made.close()
    served.wait_at_rest()


def message(engine: AttachedEngine, number: int, **fields: object) -> pb.StepRequest:
    client = engine.client
    return pb.StepRequest(number=number, boot_id=client.boot_id, epoch=client.epoch, **fields)


def one_step(engine: AttachedEngine, step: pb.StepRequest) -> pb.StepReply:
    """On a stream of its own, closed in order."""
    try:
        (reply,) = engine.client._engine_stub.Session(iter([step]))
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error
    return reply


def state_of(served: Node) -> str:
    (engine,) = served.admin.status().engines
    return engine.state


def test_a_resend_gets_the_same_bytes_and_does_nothing_twice(served: Node, engine: AttachedEngine) -> None:
    first = message(engine, 1, open=[open_of(1, tokens_of(1, SPAN + 5))])
    reply = one_step(engine, first)
    assert reply.opened[0].state == pb.OpenReply.RUNNABLE
    held, steps = served.pools(), served.counters()["step"]
    for _ in range(3):
        again = one_step(engine, first)
        assert again.SerializeToString(deterministic=True) == reply.SerializeToString(deterministic=True)
    # Whatever it says now, the number was answered.
    assert one_step(engine, message(engine, 1)) == reply
    assert served.pools() == held
    assert served.counters()["step"] == steps
    engine.client._number = 1
    engine.step([RequestStep(1, SPAN, SPAN)], closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])


def test_a_cancelled_stream_is_taken_up_in_the_same_epoch(served: Node, engine: AttachedEngine) -> None:
    tokens = tokens_of(2, 2 * SPAN)
    opened = engine.open(open_of(1, tokens))
    fill(engine, device_pages(opened), seed=2)
    broken = engine.client._stream
    broken.break_off()
    wait_for(lambda: state_of(served) == "suspect")
    assert served.admin.status().engines[0].requests == 1
    reply = one_step(engine, message(engine, 1, open=[open_of(1, tokens)]))
    assert list(reply.opened) == [opened]
    engine.step([RequestStep(1, len(tokens), len(tokens))])
    assert state_of(served) == "attached"
    engine.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
    assert engine.client._number == 3
    assert run_request(engine, 2, tokens_of(2, 3 * SPAN), seed=2) == len(tokens)


def test_streams_that_take_over_from_each_other_never_leave_the_engine_suspect(engine: AttachedEngine) -> None:
    """The old stream's end and the new one's begin race: each time the newest stream must be served."""
    for number in range(1, 60):
        stream = engine.client._engine_stub.Session(iter([message(engine, number)]))
        assert next(stream).number == number
        if number % 2:
            stream.cancel()


def test_an_old_stream_is_ended_by_a_new_one(engine: AttachedEngine) -> None:
    engine.step()
    old = engine.client._stream
    assert one_step(engine, message(engine, 2)).number == 2
    old._thread.join()
    assert old.end == StreamEnd(), "an orderly end"
    engine.client._number = 2
    engine.step()


def test_replies_are_kept_for_a_while_only(engine: AttachedEngine) -> None:
    for _ in range(engine.client.limits.stored_replies + 1):
        engine.step()
    assert one_step(engine, message(engine, 2)).number == 2
    with pytest.raises(InvalidArgument, match="the reply to step 1 is no longer stored"):
        one_step(engine, message(engine, 1))


def test_a_suspect_engine_is_given_nothing_until_it_opens_a_stream(served: Node, engine: AttachedEngine) -> None:
    engine.open(open_of(1, tokens_of(3, SPAN)))
    engine.step([RequestStep(1, SPAN, SPAN)])
    engine.client._stream.break_off()
    wait_for(lambda: state_of(served) == "suspect")
    engine.client._renew = None  # a client that does not come back by itself
    with pytest.raises(Suspect, match="open a new session stream first"):
        engine.client.export(1)
    engine.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])


def test_an_engine_without_all_its_ranks_is_told_to_attach_them(engine: AttachedEngine) -> None:
    engine.workers.ranks[1].detach()
    with pytest.raises(InvalidArgument, match="1 of 2 ranks are attached; attach all before opening"):
        one_step(engine, message(engine, 1, open=[open_of(1, tokens_of(4, SPAN))]))
    engine.workers.ranks[1].close()
    engine.workers.ranks = engine.workers.ranks[:1]


def test_a_reset_forgets_what_is_cached_and_leaves_what_runs(served: Node, engine: AttachedEngine) -> None:
    tokens = tokens_of(71, 2 * SPAN)
    assert run_request(engine, 1, tokens, 71) == 0
    served.wait_at_rest()
    cached = served.admin.prefixes().spans
    assert cached >= 2
    running = tokens_of(72, SPAN)
    pages = device_pages(engine.open(open_of(2, running, growth=0)))
    fill(engine, pages, 72)
    done = served.admin.reset(GROUP)
    assert done.forgotten_spans == cached
    assert served.admin.prefixes().spans == 0
    check_filled(engine, pages, 72)
    engine.step(closes=[pb.CloseRequest(request_id=2, reason=pb.ABORTED)])
    assert run_request(engine, 3, tokens, 71) == 0, "all of it is computed again"
    with pytest.raises(InvalidArgument, match=f"no group 'nowhere'.*{GROUP}"):
        served.admin.reset("nowhere")
