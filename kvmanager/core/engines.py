"""Engines come and go: registration, ranks, suspicion, and the end of all their processes."""

from __future__ import annotations

from kvmanager.core.events import AttachRank, DetachRank, EngineGone, FenceEngine, RegisterEngine
from kvmanager.core.fences import apply_entry, reached, resolve_fences
from kvmanager.core.group import Group
from kvmanager.core.lifecycle import drop_request
from kvmanager.core.settle import settle_tail
from kvmanager.core.spec import GroupSpec
from kvmanager.core.state import Engine, FenceEntry, State
from kvmanager.core.wholegroups import check_nobody_holds
from kvmanager.errors import InvalidArgument, LayoutMismatch, StaleEpoch, Unauthorized


def register(state: State, event: RegisterEngine) -> Engine:
    """A new epoch. The old one of that name becomes stale; what it holds waits for the end of its processes."""
    group = state.groups.get(event.group)
    if group is None:
        raise InvalidArgument(f"no group {event.group!r} on this node; it has {sorted(state.groups)}")
    _check_shape(event, group)
    _check_layouts(event, group.spec)
    _one_engine_a_group(state, event)
    before = state.engines.get(event.engine)
    if before is not None and state.tenants.name_of(before.namespace) != event.tenant:
        raise Unauthorized(f"engine {event.engine!r} is another tenant's; choose another name")
    if event.key_bytes != group.key_bytes:
        group.set_key_bytes(event.key_bytes)
    old = state.engines.pop(event.engine, None)
    if old is not None:
        _retire(state, old)
    namespace = state.namespace_id(event.namespace, event.tenant)
    engine = Engine(
        event.engine, state.next_epoch, event.group, namespace, event.ranks, heard_ns=state.now, note=event.note
    )
    state.next_epoch += 1
    state.engines[event.engine] = engine
    return engine


def _check_shape(event: RegisterEngine, group: Group) -> None:
    spec = group.spec
    if event.ranks != spec.ranks:
        raise InvalidArgument(f"engine {event.engine!r} has {event.ranks} ranks, group {spec.name!r} has {spec.ranks}")
    if event.key_tokens != spec.page_rows:
        raise InvalidArgument(f"keys of {event.key_tokens} tokens; segments of {spec.name!r} have {spec.page_rows}")
    if event.key_bytes not in (16, 32):
        raise InvalidArgument(f"keys of {event.key_bytes} bytes; 16 and 32 are served")
    if event.key_bytes != group.key_bytes and not group.empty:
        raise InvalidArgument(f"group {spec.name!r} holds keys of {group.key_bytes} bytes, not {event.key_bytes}")


def _check_layouts(event: RegisterEngine, spec: GroupSpec) -> None:
    ours = tuple(c.layout.fingerprint for chain in spec.chains for c in chain.classes)
    if event.layout_fingerprints != ours:
        names = [f"{c.name}={c.layout.fingerprint[:12]}" for chain in spec.chains for c in chain.classes]
        theirs = [fingerprint[:12] for fingerprint in event.layout_fingerprints]
        raise LayoutMismatch(
            f"engine {event.engine!r} describes its pages as {theirs}, group {spec.name!r} ({spec.kv_format.name}) as "
            f"{names}; start both with the same format and page_rows"
        )


def _one_engine_a_group(state: State, event: RegisterEngine) -> None:
    if state.groups[event.group].spec.one_holder:
        check_nobody_holds(state, event)
    if state.groups[event.group].spec.cache_only:
        return  # engines with memory of their own share the pool by leases
    for other in state.engines.values():
        tenants = state.tenants
        same = tenants.of_namespace[other.namespace] == tenants.numbers.get(event.tenant, -1)
        if other.group == event.group and other.name != event.engine and same:
            raise InvalidArgument(
                f"group {event.group!r} is used by engine {other.name!r}; one engine a group and tenant"
            )


def _retire(state: State, engine: Engine) -> None:
    engine.distrust(state.now)
    state.retired[(engine.name, engine.epoch)] = engine
    if not engine.attaches:
        engine_gone(state, EngineGone(engine.name, engine.epoch))


def attach(state: State, event: AttachRank) -> int:
    """A fresh attach id, and with it a fresh timeline, for a rank's process."""
    engine = state.engine(event.engine, event.epoch)
    if not 0 <= event.rank < engine.ranks:
        raise InvalidArgument(f"rank {event.rank} of engine {event.engine!r}, which has {engine.ranks}")
    if event.rank in engine.attaches.values():
        raise InvalidArgument(f"rank {event.rank} of engine {event.engine!r} is attached already")
    attach_id = state.next_attach
    state.next_attach += 1
    engine.attaches[attach_id] = event.rank
    engine.attached = True
    engine.attach_notes[attach_id] = event.note
    state.words_used = max(state.words_used, event.word + 1)
    state.timelines[attach_id] = 0
    return attach_id


def detach(state: State, event: DetachRank) -> None:
    """The rank can write no more. Its unfinished commits are dropped, its fences count as passed."""
    for engine in state.all_engines():
        if event.attach_id in engine.attaches:
            state.end_attach(engine, event.attach_id)
            resolve_fences(state, engine)
            engine.ranks_lost += 1
            return
    raise InvalidArgument(f"no attach id {event.attach_id}")


def suspect(state: State, name: str, epoch: int) -> None:
    """Grants stop; nothing is given back yet, since its kernels may still run."""
    engine = state.any_engine(name, epoch)
    if engine is not None:
        engine.distrust(state.now)


def fence_suspects(state: State) -> None:
    """Notes who stands still, and asks, once, for the end of engines that have been suspect for too long."""
    for engine in state.all_engines():
        if _stands_still(state, engine, state.now):
            engine.stalled, engine.suspect_ns, engine.fenced = True, state.now, False
        if _unheard(state, engine, state.now):
            engine.fenced = True
            stalled = engine.standing(state.timelines) if engine.stalled else ()
            state.effects.append(FenceEngine(engine.name, engine.epoch, stalled))


def overdue(state: State, now: int) -> bool:
    """Whether `fence_suspects` would note or ask for something at `now`."""
    return any(_stands_still(state, engine, now) or _unheard(state, engine, now) for engine in state.all_engines())


def _unheard(state: State, engine: Engine, now: int) -> bool:
    return not engine.trusted and not engine.fenced and now - engine.suspect_ns >= state.limits.fence_after_ns


def _stands_still(state: State, engine: Engine, now: int) -> bool:
    """Whether a fence waits, and no rank that it waits for has moved for too long. An idle engine has no fence."""
    if not engine.fences or not engine.trusted:
        return False
    return now - max(engine.fences[0].since, engine.moved_ns) >= state.limits.stall_after_ns


def resume(state: State, name: str, epoch: int) -> Engine:
    """The same epoch opened its stream again."""
    engine = state.engines.get(name)
    if engine is None or engine.epoch != epoch:
        raise StaleEpoch(f"engine {name!r} epoch {epoch} is gone or replaced; register again")
    if engine.stalled:
        raise state.stands_still(engine)
    engine.suspect, engine.heard_ns = False, state.now
    return engine


def expire_sessions(state: State) -> None:
    """Ends epochs of which no rank ever attached and nothing was heard for a lease and grace: they hold no memory."""
    for engine in state.all_engines():
        if _lapsed(state, engine, state.now):
            engine_gone(state, EngineGone(engine.name, engine.epoch))


def lapsed(state: State, now: int) -> bool:
    """Whether `expire_sessions` would end something at `now`."""
    return any(_lapsed(state, engine, now) for engine in state.all_engines())


def _lapsed(state: State, engine: Engine, now: int) -> bool:
    limits = state.limits
    return not engine.attached and now > engine.heard_ns + limits.session_ttl_ns + limits.ticket_grace_ns


def engine_gone(state: State, event: EngineGone) -> None:
    """No process of the engine can touch memory any more: what it held returns; ready spans stay in the cache."""
    engine = state.any_engine(event.engine, event.epoch)
    if engine is None:
        return
    for attach_id in list(engine.attaches):
        state.end_attach(engine, attach_id)
    while engine.fences:
        entry = engine.fences.popleft()
        apply_entry(state, engine, entry, keep_commits=reached(state, entry))
    apply_entry(state, engine, engine.covered, keep_commits=False)
    engine.covered = FenceEntry({})
    for request in list(engine.requests.values()):
        settle_tail(state, request)
        drop_request(state, request)
    state.forget_attaches(engine)
    claims = state.groups[engine.group].claims
    for who in [who for who in claims if who[:2] == (engine.name, engine.epoch)]:
        del claims[who]
    if state.engines.get(event.engine) is engine:
        del state.engines[event.engine]
    state.retired.pop((event.engine, event.epoch), None)
