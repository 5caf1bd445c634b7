"""What the history keeps of an event and its effects: plain records, made beside the owner loop.

Every record has `what`; the file adds `t`, seconds of the wall clock. A miss gets its reason here, from what was
forgotten lately, from requests that are open, and from prompts of other namespaces.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from kvmanager.core.events import (
    Close,
    Effect,
    EngineGone,
    EngineResumed,
    EngineSuspect,
    Event,
    ExportRequestKV,
    FenceEngine,
    MoverGone,
    MoverJoined,
    Notified,
    Open,
    Opened,
    PlanEnded,
    Recovered,
    Registered,
    RegisterEngine,
    Replied,
    StartPull,
    Step,
    StepDone,
    SubmitPlan,
)
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, LeaseEvent, ReserveSpans
from kvmanager.core.operatorevents import (
    Cordon,
    EvictPool,
    EvictPrefix,
    EvictTenant,
    Forgot,
    PinPrefix,
    Reset,
    UnpinPrefix,
)
from kvmanager.core.state import State
from kvmanager.errors import CapacityError, KVError

Record = dict[str, Any]
K = TypeVar("K")
V = TypeVar("V")
FORGOTTEN_MAX: Final = 131_072
"""Segments of which it is remembered why they were forgotten."""
PROMPTS_MAX: Final = 16_384
"""First segments of prompts of which it is remembered in which namespaces they occurred."""
NAMES_MAX: Final = 4_096
"""Requests of an engine of which it is remembered that a store was told."""
PAGES_TOLD: Final = 16
"""Pages in a record; it may be about more."""
KEY_HEX: Final = 16
"""Hex digits of a key in a record."""


@dataclass
class _Engine:
    """What a record needs of an epoch. requests: keys of open ones, as far as they are known.

    names: the engine's own of open ones. loads: leases to read from. told: names of which a store was told.
    """

    group: str
    tenant: str
    namespace: int
    key_bytes: int
    key_tokens: int
    requests: dict[int, bytearray] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    loads: set[int] = field(default_factory=set)
    told: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def end(self, number: int) -> None:
        """It is open no more."""
        self.requests.pop(number, None)
        self.names.pop(number, None)
        self.loads.discard(number)


def name_of(engine: str, request: int) -> str:
    """How a record and a person name a request."""
    return f"{engine}/{request}"


def refusal_of(error: KVError) -> Record:
    """The parts of a refusal."""
    said: Record = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, CapacityError):
        said |= {"pool": error.pool, "needed": error.needed, "free": error.free, "holder": error.holder}
        said["retry_after_ms"] = error.retry_after_ns // 1_000_000
    return said


class Lately(Generic[K, V]):
    """What was put last under each key: the newest `most` keys, or up to half of them fewer."""

    def __init__(self, most: int) -> None:
        self._half = max(most // 2, 1)
        self._newer: dict[K, V] = {}
        self._older: dict[K, V] = {}

    def put(self, key: K, value: V) -> None:
        """Remembers it; the older half goes when the newer is full."""
        if len(self._newer) >= self._half and key not in self._newer:
            self._older, self._newer = self._newer, {}
        self._newer[key] = value

    def get(self, key: K) -> V | None:
        """What was put last, None where that is unknown."""
        return self._newer.get(key, self._older.get(key))

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)


class Recorder:
    """Derives records, event by event. Its memory is bounded; what a restart loses it reads from the state again."""

    def __init__(self, state: State, policy: str) -> None:
        self._policy = policy
        self._namespaces = dict(state.namespaces)
        self._engines: dict[tuple[str, int], _Engine] = {}
        self._forgotten = Lately[int, Record](FORGOTTEN_MAX)
        self._prompts: OrderedDict[int, set[int]] = OrderedDict()
        self._plans: dict[int, int] = {}
        for engine in state.all_engines():
            group = state.groups[engine.group]
            tenant = state.tenants.specs[state.tenants.of_namespace[engine.namespace]].name
            known = _Engine(engine.group, tenant, engine.namespace, group.key_bytes, group.spec.page_rows)
            known.requests = {number: bytearray(request.keys) for number, request in engine.requests.items()}
            self._engines[engine.name, engine.epoch] = known

    def records(self, event: Event, now: int, effects: Sequence[Effect]) -> Iterator[Record]:
        """What is kept of an event at `now` (ns)."""
        answer = next((effect.answer for effect in effects if isinstance(effect, Replied)), None)
        # Losses first: they made the room that the answer speaks of.
        for effect in effects:
            if isinstance(effect, Forgot):
                yield from self._forgot(effect)
        match event:
            case Step() if isinstance(answer, StepDone):
                yield from self._step(event, answer)
            case AcquirePrefix() | ReserveSpans() | EndLease():
                known = self._engines.get((event.engine, event.epoch))
                if known is not None:
                    yield from self._lease(known, event, answer)
            case PlanEnded():
                yield self._plan_ended(event, now)
            case _:
                yield from self._other(event, answer)
        for effect in effects:
            yield from self._effect(effect, now)

    def _other(self, event: Event, answer: object) -> Iterator[Record]:
        refused = {"refused": str(answer)} if isinstance(answer, KVError) else {}
        match event:
            case RegisterEngine() if isinstance(answer, Registered):
                number = self._namespaces.setdefault(event.namespace, len(self._namespaces))
                epoch = answer.epoch
                known = _Engine(event.group, event.tenant, number, event.key_bytes, event.key_tokens)
                self._engines[event.engine, epoch] = known
                yield {"what": "engine", "engine": event.engine, "epoch": epoch, "now": "registered",
                       "group": event.group, "tenant": event.tenant}  # fmt: skip
            case EngineSuspect() | EngineResumed() | EngineGone():
                yield self._life(event)
                if isinstance(event, EngineGone):
                    self._engines.pop((event.engine, event.epoch), None)
            case MoverGone():
                yield {"what": "mover", "now": "gone"}
            case MoverJoined():
                yield {"what": "mover", "now": "joined", "incarnation": event.incarnation}
            case Recovered():
                yield {"what": "daemon", "now": "went on from the journal", "boot": event.boot_id}
            case ExportRequestKV():
                yield {"what": "export", "request": name_of(event.engine, event.request_id),
                       "ticket": event.ticket_id, **refused}  # fmt: skip
            case Reset() | PinPrefix() | UnpinPrefix() | EvictPrefix() | EvictTenant() | EvictPool() | Cordon():
                asked = {name: _plain(value) for name, value in vars(event).items()}
                yield {"what": "operator", "asks": type(event).__name__, **asked, **refused}

    def _life(self, event: EngineSuspect | EngineResumed | EngineGone | FenceEngine) -> Record:
        words = {EngineSuspect: "suspect", EngineResumed: "resumed", EngineGone: "gone", FenceEngine: "to be fenced"}
        known = self._engines.get((event.engine, event.epoch))
        held = len(known.requests) if known else 0
        return {"what": "engine", "engine": event.engine, "epoch": event.epoch, "now": words[type(event)],
                "requests": held}  # fmt: skip

    # ------------------------------------------------------------------------------ requests

    def _step(self, event: Step, answer: StepDone) -> Iterator[Record]:
        known = self._engines.get((event.engine, event.epoch))
        answers = {opened.request_id: opened for opened in answer.opened}
        for asked in event.opens:
            opened = answers.get(asked.request_id)
            if opened is not None and known is not None:
                yield self._opened(event.engine, known, asked, opened)
        for progress in event.progress:
            if known is not None and progress.new_keys and progress.request_id in known.requests:
                known.requests[progress.request_id] += progress.new_keys
        for grown in answer.grown:
            if grown.error is not None:
                yield self._refusal(event.engine, grown.request_id, "to grow", grown.error)
        for failed in answer.errors:
            yield self._refusal(event.engine, failed.request_id, "what it asked", failed.error)
        for close in event.closes:
            yield self._closed(event.engine, known, close)

    def _closed(self, engine: str, known: _Engine | None, close: Close) -> Record:
        record: Record = {"what": "close", "request": name_of(engine, close.request_id),
                          "closing": close.closing.value, "stop_reason": close.stop_reason}  # fmt: skip
        if known is not None:
            record |= _name(known, close.request_id)
            known.end(close.request_id)
        return record

    def _refusal(self, engine: str, request: int, of: str, error: KVError) -> Record:
        return {"what": "refusal", "request": name_of(engine, request), "of": of, **refusal_of(error)}

    def _opened(self, engine: str, known: _Engine, asked: Open, opened: Opened) -> Record:
        if opened.error is not None:
            refused = self._refusal(engine, asked.request_id, "to open", opened.error)
            if asked.name:
                refused["name"] = asked.name
            return refused | {"prompt_tokens": asked.prompt_tokens, "growth_tokens": asked.growth_tokens}
        record: Record = {
            "what": "open", "request": name_of(engine, asked.request_id), "session": asked.session_id,
            "group": known.group, "tenant": known.tenant, "state": opened.state,
            "prompt_tokens": asked.prompt_tokens, "growth_tokens": asked.growth_tokens,
            "cached_tokens": opened.cached_tokens,
        }  # fmt: skip
        imported = asked.ticket.committed_tokens if asked.ticket else 0
        if asked.ticket is not None:
            record["ticket"] = asked.ticket.ticket_id
        most = max(imported, asked.prompt_tokens - 1) // known.key_tokens
        miss = self._miss(known, asked.keys, opened.cached_tokens, most)
        if miss:
            record["miss"] = miss
        known.requests[asked.request_id] = bytearray(asked.keys)
        if asked.name:
            record["name"] = known.names[asked.request_id] = asked.name
        return record

    # -------------------------------------------------------------------------------- leases

    def _lease(self, known: _Engine, event: LeaseEvent, answer: object) -> Iterator[Record]:
        of = {"request": name_of(event.engine, event.request_id), "epoch": event.epoch}
        match event:
            case EndLease() if not isinstance(answer, KVError):
                yield self._lease_ended(known, event, of)
            case AcquirePrefix() if isinstance(answer, Opened):
                yield from self._acquired(known, event, answer, of)
            case ReserveSpans() if isinstance(answer, Opened):
                yield from self._reserved(known, event, answer, of)
            case ReserveSpans() if isinstance(answer, CapacityError):
                yield {"what": "refusal", **of, "name": event.name, "of": "to store", **refusal_of(answer)}

    def _acquired(self, known: _Engine, event: AcquirePrefix, opened: Opened, of: Record) -> Iterator[Record]:
        most = len(event.keys) // known.key_bytes
        record: Record = {
            "what": "open", **of, "name": event.name, "state": "lease", "group": known.group, "tenant": known.tenant,
            "cached_tokens": opened.cached_tokens, "prompt_tokens": most * known.key_tokens,
        }  # fmt: skip
        if opened.cached_tokens:
            known.names[event.request_id] = event.name
            known.loads.add(event.request_id)
        miss = self._miss(known, event.keys, opened.cached_tokens, most)
        yield record | ({"miss": miss} if miss else {})

    def _reserved(self, known: _Engine, event: ReserveSpans, opened: Opened, of: Record) -> Iterator[Record]:
        """Of a request that is stored in several leases the first one tells what was known, and why no more."""
        most = len(event.keys) // known.key_bytes
        miss = self._miss(known, event.keys, opened.cached_tokens, most)
        known.requests[event.request_id] = bytearray(event.keys)
        known.names[event.request_id] = event.name
        if event.name in known.told:
            return
        if event.name:
            known.told[event.name] = None
            if len(known.told) > NAMES_MAX:
                known.told.popitem(last=False)
        record: Record = {
            "what": "store", **of, "name": event.name, "session": event.session_id, "group": known.group,
            "tenant": known.tenant, "cached_tokens": opened.cached_tokens, "prompt_tokens": most * known.key_tokens,
        }  # fmt: skip
        yield record | ({"miss": miss} if miss else {})

    def _lease_ended(self, known: _Engine, event: EndLease, of: Record) -> Record:
        number = event.request_id
        how = "stored" if event.committed else "loaded" if number in known.loads else "given up"
        if event.failed_pages or event.failure:
            how = "failed"
        record: Record = {"what": "lease_end", **of, "name": known.names.get(number, ""), "how": how}
        if event.committed:
            keys = known.requests.get(number)
            covered = len(keys) // known.key_bytes * known.key_tokens if keys else 0
            record["tokens"] = event.committed_tokens or covered
        if how == "failed":
            record |= {"failed_pages": list(event.failed_pages[:PAGES_TOLD]), "failure": event.failure}
        known.end(number)
        return record

    # ------------------------------------------------------------------------------ misses

    def _miss(self, known: _Engine, keys: bytes, cached_tokens: int, most: int) -> Record:
        """Why the prefix ended where it did; empty for a prompt that was found as far as it may be."""
        width, at = known.key_bytes, cached_tokens // known.key_tokens
        elsewhere = self._other_namespaces(known.namespace, keys[:width])
        if at >= most:
            return {}
        key = keys[at * width : (at + 1) * width]
        miss: Record = {"at_tokens": cached_tokens, "missed_tokens": most * known.key_tokens - cached_tokens,
                        "key": key[: KEY_HEX // 2].hex()}  # fmt: skip
        writer = self._writer(known.namespace, key, at, width)
        lost = self._forgotten.get(_of_namespace(known.namespace, _number(key)))
        if writer is not None:
            return miss | {"why": "not yet fenced", "written_by": writer}
        if lost is not None:
            return miss | lost
        if at == 0 and elsewhere:
            return miss | {"why": "other namespace", "namespaces": sorted(elsewhere)}
        return miss | {"why": "never seen"}

    def _writer(self, namespace: int, key: bytes, at: int, width: int) -> str | None:
        """An open request that has the segment, and so will publish it."""
        start, end = at * width, (at + 1) * width
        for (name, _), engine in self._engines.items():
            if engine.namespace == namespace:
                for number, keys in engine.requests.items():
                    if keys[start:end] == key:
                        return name_of(name, number)
        return None

    def _other_namespaces(self, namespace: int, first: bytes) -> set[int]:
        """Others in which a prompt begins alike; notes this one."""
        if not first:
            return set()
        number = _number(first)
        seen = self._prompts.setdefault(number, set())
        self._prompts.move_to_end(number)
        if len(self._prompts) > PROMPTS_MAX:
            self._prompts.popitem(last=False)
        others = seen - {namespace}
        seen.add(namespace)
        return others

    def _forgot(self, effect: Forgot) -> Iterator[Record]:
        for namespace in sorted(set(effect.namespaces.tolist())):
            keys = effect.keys[effect.namespaces == namespace]
            record: Record = {
                "what": "forgot", "why": effect.why.value, "pool": effect.pool, "namespace": namespace,
                "spans": len(keys), "policy": self._policy,
                "keys": [_hex(first) for first in keys[:, 0].tolist()] if keys.shape[1] else [],
            }  # fmt: skip
            yield record
            loss = _loss(record)
            for number in keys.ravel().tolist():
                if number:
                    self._forgotten.put(_of_namespace(namespace, number), loss)

    def remember(self, record: Record) -> None:
        """A record of losses, or of a lease that may still be open, that an earlier daemon wrote."""
        if record["what"] in ("open", "store"):
            engine, _, number = record["request"].rpartition("/")
            known = self._engines.get((engine, record["epoch"]))
            if known is not None and int(number) in known.requests:
                known.names[int(number)] = record["name"]
                if record["what"] == "open":
                    known.loads.add(int(number))
            return
        loss = _loss(record)
        for text in record.get("keys", ()):
            number = int.from_bytes(bytes.fromhex(text), "little")
            self._forgotten.put(_of_namespace(record["namespace"], number), loss)

    # ------------------------------------------------------------------------------ effects

    def _effect(self, effect: Effect, now: int) -> Iterator[Record]:
        match effect:
            case SubmitPlan():
                self._plans[effect.plan.plan_id] = now
                yield {"what": "plan", "plan": effect.plan.plan_id, "purpose": effect.plan.purpose.value,
                       "bytes": effect.plan.total_bytes}  # fmt: skip
            case StartPull():
                self._plans[effect.plan_id] = now
                yield {"what": "plan", "plan": effect.plan_id, "purpose": "pull", "ticket": effect.ticket.ticket_id,
                       "from": effect.ticket.node_address}  # fmt: skip
            case FenceEngine():
                yield self._life(effect)
            case Notified():
                yield from self._notice(effect)

    def _notice(self, told: Notified) -> Iterator[Record]:
        notice = told.notice
        known = self._engines.get((told.engine, told.epoch))
        if notice.failed is not None:
            yield self._refusal(told.engine, notice.failed.request_id, "to go on", notice.failed.error)
        if notice.ready is not None and notice.ready.error is not None:
            refused = self._refusal(told.engine, notice.ready.request_id, "to wait any longer", notice.ready.error)
            yield refused | _name(known, notice.ready.request_id)
            if known is not None:
                known.end(notice.ready.request_id)
        elif notice.ready is not None:
            ready = {"what": "ready", "request": name_of(told.engine, notice.ready.request_id)}
            yield ready | _name(known, notice.ready.request_id)

    def _plan_ended(self, event: PlanEnded, now: int) -> Record:
        began = self._plans.pop(event.plan_id, now)
        record: Record = {"what": "plan_end", "plan": event.plan_id, "outcome": event.outcome.value,
                          "ms": round((now - began) / 1e6, 3)}  # fmt: skip
        return record | ({"error": str(event.error)} if event.error else {})


def _name(known: _Engine | None, number: int) -> Record:
    """The engine's own name of a request, where it has one."""
    name = known.names.get(number) if known is not None else None
    return {"name": name} if name else {}


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def _hex(number: int) -> str:
    return number.to_bytes(8, "little").hex()


def _of_namespace(namespace: int, number: int) -> int:
    """One number for both: a tuple would take thrice the memory."""
    return namespace << 64 | number


def _loss(record: Record) -> Record:
    """What is said of a miss of a segment that was forgotten; the record itself is long."""
    return {"why": record["why"], "pool": record["pool"], "policy": record["policy"], "forgotten_t": record.get("t")}
