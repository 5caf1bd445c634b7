"""`python -m tests.chaos.engine`: an engine as a process of its own, which is told what to do and checks every byte.

It reads one JSON object a line and answers each with one: {"ok": ...} or {"error": ..., "kind": ...}. With the kind
"wrong" it has found wrong bytes; with "stale" the daemon does not know it any more. It ends when it can't go on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import EngineClient, RequestStep, StepResult
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import KVError, StaleBoot, StaleEpoch
from kvmanager.protos import kvmanager_pb2 as pb
from tests.chaos.content import Text, new_text, texts_of
from tests.chaos.places import NO_PAGE, Places
from tests.chaos.ranks import LocalRank, RankProcess, Ranks
from tests.integration.nodes_support import GROUP, LAYOUT, RANKS, ROWS, SPAN, SPARSE_LAYOUTS

CLASSES: Final = {"source": ("kv",), "target": ("latent", "indexer")}
STEPS_S: Final = 20.0


class WrongBytes(Exception):
    """Bytes that are not what was written: how many, and where."""

    def __init__(self, count: int, where: str) -> None:
        super().__init__(f"{count} B of {where}")
        self.count = count


class ChaosEngine(AttachedEngine):
    """An engine over `Ranks`. One request at a time."""

    def __init__(self, runtime_dir: Path, name: str, side: str, seed: int) -> None:
        """The source's ranks are processes of their own, the target's one runs here."""
        self._ours = [RankProcess() for _ in range(RANKS)] if side == "source" else [LocalRank()]
        self.pids = [getattr(rank, "pid", os.getpid()) for rank in self._ours]
        self._side = side
        self._texts = texts_of(seed, SPAN)
        self._seed = seed
        self._requests = 0
        self._open: set[int] = set()
        self.checked_pages = 0
        with ExitStack() as undo:
            attachment = attach(runtime_dir, "engine", name)
            undo.callback(attachment.close)
            attached = False

            def renew() -> int:
                for rank in self._ours if attached else []:
                    rank.renew()
                return attachment.renew()

            channel = grpc_channel(attachment)
            undo.callback(channel.close)
            layouts = [LAYOUT] if side == "source" else SPARSE_LAYOUTS
            self.client = EngineClient(
                channel, attachment=attachment, engine=name, group=GROUP if side == "source" else "decode-0",
                namespace=NAMESPACE,
                layout_fingerprints=[layout.fingerprint for layout in layouts], ranks=len(self._ours), renew=renew,
            )  # fmt: skip
            epoch = self.client.epoch
            ids = [rank.attach(str(runtime_dir), name, epoch, number) for number, rank in enumerate(self._ours)]
            attached = True
            self.workers = Ranks(self._ours, ids)  # type: ignore[assignment]
            self._undo = undo.pop_all()

    # ------------------------------------------------------------------------------ what it is told

    def prefill(self, text: int, export: bool) -> dict[str, Any]:
        """Computes a prompt in two pieces, and gives a ticket on it. `text` < 0: one of those that come once."""
        return self._prefill(self._texts[text] if text >= 0 else new_text(self._seed - text, SPAN), export)

    def _prefill(self, prompt: Text, export: bool) -> dict[str, Any]:
        length = prompt.prompt_tokens
        request_id, opened, places = self._begin(prompt, length)
        cached = self._check(prompt, places, opened.cached_tokens)
        middle = (cached + length) // 2
        self._write(prompt, places, cached, middle)
        self._step(places, RequestStep(request_id, length, middle))
        self._write(prompt, places, middle, length)
        self._step(places, RequestStep(request_id, length, length))
        ticket = self.client.export(request_id).SerializeToString().hex() if export else ""
        self._end(request_id, pb.FINISHED)
        return {"cached": cached, "ticket": ticket}

    def decode(self, text: int, ticket: str) -> dict[str, Any]:
        """Takes a prompt by ticket, and adds its answer in three messages, with a draft that is rejected."""
        return self._decode(self._texts[text], ticket)

    def _decode(self, whole: Text, ticket: str) -> dict[str, Any]:
        length, end = whole.prompt_tokens, len(whole.tokens)
        shown = pb.Ticket.FromString(bytes.fromhex(ticket))
        request_id, opened, places = self._begin(whole, length, end - length + 8, shown)
        cached = self._check(whole, places, opened.cached_tokens)
        assert cached == length, f"{cached} of {length} tokens came"
        middle = (length + end) // 2
        self._step(places, RequestStep(request_id, end + 4, length))
        self._write(whole, places, length, middle)
        self._step(places, self._row(request_id, whole, length, middle, end + 4))
        self._write(whole, places, middle, end)
        for position in range(end, end + 3):  # drafts: never committed, never to be found
            self._garble(places, position)
        self._step(places, self._row(request_id, whole, middle, end, end, rejected=3))
        self._check(whole, places, end)
        self._end(request_id, pb.FINISHED)
        return {"cached": cached}

    def verify(self) -> dict[str, Any]:
        """Opens every prompt once more and compares all that it hits; tokens found of each."""
        found = []
        for text in self._texts:
            length = text.prompt_tokens if self._side == "source" else len(text.tokens)
            request_id, opened, places = self._begin(text, length)
            found.append(self._check(text, places, opened.cached_tokens))
            self._end(request_id, pb.ABORTED)
        return {"found": found}

    def give_up(self) -> dict[str, Any]:
        """Aborts what an error left open."""
        for request_id in list(self._open):
            self._end(request_id, pb.ABORTED)
        return {}

    def leave(self) -> dict[str, Any]:
        """Detaches and says so."""
        self.close()
        return {}

    # ------------------------------------------------------------------------------- steps

    def _begin(
        self, text: Text, tokens: int, growth: int = 0, ticket: pb.Ticket | None = None
    ) -> tuple[int, pb.OpenReply, Places]:
        self._requests += 1
        request_id = self._requests
        self._open.add(request_id)
        opened = self.open(
            pb.OpenRequest(
                request_id=request_id, prompt_tokens=tokens, growth_tokens=growth,
                prompt_keys=text.keys(NAMESPACE, tokens), ticket=ticket,
            ), STEPS_S,
        )  # fmt: skip
        places = Places(len(self._ours), ROWS)
        places.append(opened.spans)
        self.workers.run_plans(opened.worker_plans)
        return request_id, opened, places

    def _step(self, places: Places, row: RequestStep) -> None:
        result: StepResult = self.step([row])
        growth = result.growth.get(row.request_id)
        if growth is not None:
            places.truncate(growth.spans[0].first_span if growth.spans else growth.spans_kept)
            places.append(growth.spans)
        for moved in result.residency.get(row.request_id, ()):
            places.move(moved)

    def _row(
        self, request_id: int, text: Text, before: int, now: int, capacity: int, rejected: int = 0
    ) -> RequestStep:
        keys, known = text.keys(NAMESPACE, now), len(text.keys(NAMESPACE, before))
        return RequestStep(request_id, capacity, now, rejected, keys[known:])

    def _end(self, request_id: int, reason: int) -> None:
        self.step(closes=[pb.CloseRequest(request_id=request_id, reason=reason)])  # type: ignore[arg-type]
        self._open.discard(request_id)

    def _write(self, text: Text, places: Places, start: int, end: int) -> None:
        for number, rank in enumerate(self._ours):
            positions, ordinals, slots = places.find(np.arange(start, end), number)
            for page_class in CLASSES[self._side] if len(positions) else ():
                device, _ = places.pages(page_class, ordinals)
                assert (device != NO_PAGE).all(), f"no device page to write to: {positions[device == NO_PAGE]}"
                rank.write(page_class, device, slots, text.digests[positions])

    def _garble(self, places: Places, position: int) -> None:
        for number, rank in enumerate(self._ours):
            positions, ordinals, slots = places.find(np.array([position]), number)
            for page_class in CLASSES[self._side] if len(positions) else ():
                rank.write(page_class, places.pages(page_class, ordinals)[0], slots, np.array([77], np.uint64))

    def _check(self, text: Text, places: Places, cached: int) -> int:
        """Compares the first `cached` tokens in every rank. Raises WrongBytes."""
        for number, rank in enumerate(self._ours):
            positions, ordinals, slots = places.find(np.arange(cached), number)
            for page_class in CLASSES[self._side] if len(positions) else ():
                device, host = places.pages(page_class, ordinals)
                self.checked_pages += len(np.unique(ordinals))
                for tier, pages, there in (("device", device, device != NO_PAGE), ("host", host, device == NO_PAGE)):
                    if not there.any():
                        continue
                    assert (pages[there] != NO_PAGE).all(), f"a hit without bytes: {positions[there]}"
                    digests = text.digests[positions[there]]
                    wrong = rank.wrong(page_class, tier, pages[there], slots[there], digests)
                    if wrong:
                        where = f"{tier} {page_class} rows, rank {number}, {cached} tokens hit"
                        raise WrongBytes(wrong, where)
        return cached


class Obedient(Protocol):
    """What is told what to do by name, and counts the pages that it compared."""

    pids: list[int]
    checked_pages: int


def _answer(engine: Obedient, asked: dict[str, Any]) -> dict[str, Any]:
    before = engine.checked_pages
    try:
        result = getattr(engine, asked.pop("do"))(**asked)
        return {"ok": result, "pages": engine.checked_pages - before}
    except WrongBytes as error:
        return {"error": str(error), "kind": "wrong", "wrong": error.count, "pages": engine.checked_pages - before}
    except (StaleBoot, StaleEpoch) as error:
        return {"error": str(error), "kind": "stale", "pages": 0}
    except KVError as error:
        return {"error": f"{type(error).__name__}: {error}", "kind": "refused", "pages": engine.checked_pages - before}


def main(make: Callable[[Path, str, str, int], Obedient] = ChaosEngine) -> None:
    """RUNTIME_DIR NAME SIDE SEED."""
    runtime_dir, name, side, seed = sys.argv[1:]
    try:
        engine = make(Path(runtime_dir), name, side, int(seed))
    except KVError as error:
        print(json.dumps({"error": str(error), "kind": "stale", "pages": 0}), flush=True)
        os._exit(1)
    print(json.dumps({"ok": engine.pids, "pages": 0}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        leaving = asked["do"] == "leave"
        print(json.dumps(_answer(engine, asked)), flush=True)
        if leaving:
            return
    os._exit(0)


if __name__ == "__main__":
    main()
