"""What a hand-off of 1,048,576 tokens costs the two daemons' CPUs, from export to release, bytes and gRPC apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from kvmanager.configuration.groups import core_limits, plan_memory
from kvmanager.configuration.reading import parse_config
from kvmanager.core.events import (
    AcceptTicket,
    CheckTicket,
    CopyOutcome,
    Event,
    ExportRequestKV,
    PlanEnded,
    ReleaseTicket,
    TicketInfo,
)
from kvmanager.daemon.handoff import source_spans
from kvmanager.daemon.pulls import Staging, TargetClass, build_pull
from kvmanager.planwire import ring_from_proto, ring_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.messages import span_run
from kvmanager.units import KIB, MIB
from kvmanager.wire import layout_from_proto, layout_to_proto, pack_u32
from tests.bench.figure import Figure
from tests.sim.driver import Client, Driver

TOKENS = 1_048_576
ROUNDS = 5


class _Clock:
    """CPU seconds by step, of the round that took least in all."""

    def __init__(self) -> None:
        self.best: dict[str, float] = {}
        self._this: dict[str, float] = {}

    def run(self, step: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        self._this[step] = time.process_time() - started
        return result

    def end_round(self) -> None:
        if not self.best or sum(self._this.values()) < sum(self.best.values()):
            self.best = self._this
        self._this = {}


def _driver(mode: str) -> Driver:
    config = parse_config(files("kvmanager").joinpath(f"deployments/{mode}.toml").read_text(encoding="utf-8"))
    return Driver(list(plan_memory(config).groups)[:1], core_limits(config))


def figures() -> Iterator[Figure]:
    """Each step, all of them, and the pull on the wire; ratios are shares of the whole."""
    source, target = _driver("prefill-pcp8-dcp8"), _driver("decode-hisparse")
    clients = [Client(driver, next(iter(driver.node.state.groups))) for driver in (source, target)]
    clock, sizes = _Clock(), {}
    for number in range(1, ROUNDS + 1):
        sizes = _hand_off(clock, source, target, clients, number)
        clock.end_round()
    whole = sum(clock.best.values())
    for step, seconds in clock.best.items():
        yield Figure(f"hand-off of {TOKENS:,} tokens: {step}", seconds * 1e3, "ms CPU", "all steps", seconds / whole)
    yield Figure("... all steps", whole * 1e3, "ms CPU", "itself", 1.0)
    for name, size in sizes.items():
        yield Figure(f"... {name} on the wire", size / KIB, "KiB", "both messages", size / sum(sizes.values()))


def _hand_off(clock: _Clock, source: Driver, target: Driver, clients: list[Client], number: int) -> dict[str, int]:
    prefill, decode = clients
    prefill.open(number, TOKENS, number)
    prefill.commit(number, TOKENS)
    prefill.run()
    source.end_all()
    (engine,) = source.node.state.engines.values()
    ticket_id = f"t{number}"

    def apply(step: str, event: Event) -> list[Any]:
        effects: list[Any] = clock.run(step, lambda: source.node.apply(event, source.now))
        return effects

    apply("export", ExportRequestKV(engine.name, engine.epoch, number, ticket_id))
    (replied,) = apply("accept", AcceptTicket(ticket_id, "h"))
    answer = replied.answer
    c = source.node.state.groups[engine.group].chains[0].spec.classes[0]
    reply = clock.run("accept encoded", lambda: pb.AcceptReply(
        chains=[pb.SourceChain(
            layout=layout_to_proto(c.layout),
            spans=span_run(table),
            ranks=[pb.SourceRank(rank=rank, base_address=rank << 40, size_bytes=1) for rank in range(8)],
        ) for table in answer.spans],
        generations=pack_u32(answer.generations),
    ).SerializeToString())  # fmt: skip
    decode.open(number, TOKENS + 1, number, ticket=TicketInfo(ticket_id, "peer", TOKENS, 10**9))
    (pull,) = target.pulls.values()
    classes = {k.name: k for k in target.node.state.groups[pull.group].chains[0].spec.classes}

    def command() -> bytes:
        (accepted,) = pb.AcceptReply.FromString(reply).chains
        layout = layout_from_proto(accepted.layout)
        targets = [TargetClass(classes[t.page_class].layout, t) for part in pull.chains for t in part.targets]
        staging = Staging.of(64 * MIB, 8 * MIB, layout.page_bytes)
        addresses = [rank.base_address for rank in accepted.ranks]
        ring = build_pull(pull.plan_id, layout, source_spans(accepted), addresses, targets, staging, 0)
        return ring_to_proto(ring).SerializeToString()

    encoded = clock.run("pull planned and encoded", command)
    clock.run("pull decoded by the mover", lambda: ring_from_proto(pb.Pull.FromString(encoded)))
    apply("check", CheckTicket(ticket_id, answer.generations))
    clock.run(
        "published at the target",
        lambda: target.node.apply(PlanEnded(pull.plan_id, CopyOutcome.DONE), target.now),
    )
    apply("release", ReleaseTicket(ticket_id, "h"))
    target.pulls.clear()
    for client in (decode, prefill):
        client.close(number)
        client.run()
    return {"the accepted ticket": len(reply), "the pull": len(encoded)}
