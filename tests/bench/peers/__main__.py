"""`python -m tests.bench.peers`: one run of us, LMCache (ZMQ and gRPC) and Mooncake on this machine; ratios, and JSON.

A ratio is theirs / ours in time (ours / theirs in calls a second): above 1 we are faster. Everything runs on the CPU,
one after the other in one run, and each peer in an environment of its own; one that can't be had is skipped aloud.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.bench import lmcache_reference
from tests.bench.lmcache_reference import Unavailable
from tests.bench.peers import ours, venvs
from tests.bench.peers.cases import CAPACITY_PAGES, CLIENTS, PAGE_BYTES

CASES = ("lookup", "pages", "evict", "kill", "load")
Results = dict[str, Any]


def lmcache_cases(venv: Path, transport: str) -> Iterator[tuple[str, Callable[[], Results]]]:
    """Each case on a server of its own."""

    def on_server(case: str, l1_gib: float, *more: str) -> Results:
        with venvs.lmcache(venv, transport, l1_gib) as (rpc, http):
            return venvs.ask(venv, "lmcache_peer.py", case, rpc, http, *more)

    def load() -> Results:
        with venvs.lmcache(venv, transport, 1) as (rpc, http):
            rates = {}
            for clients in (1, CLIENTS):
                running = [venvs.start(venv, "lmcache_peer.py", "load", rpc, http) for _ in range(clients)]
                rates[clients] = sum(venvs.answer(process)["lookups a second"] for process in running)
        return {f"lookups a second, {clients} clients": rate for clients, rate in rates.items()}

    def kill() -> Results:
        lmcache_reference.VENV = venv
        found = lmcache_reference.restart()
        return {"kill before": found.before, "kill after": found.after, "kill s": found.healthy_s}

    gib = CAPACITY_PAGES * PAGE_BYTES / (1 << 30)
    yield "lookup", lambda: on_server("lookup", 1)
    yield "pages", lambda: on_server("pages", 1)
    yield "evict", lambda: on_server("evict", gib, str(CAPACITY_PAGES))
    yield "load", load
    if transport == "zmq":
        yield "kill", kill


def mooncake_cases(venv: Path) -> Iterator[tuple[str, Callable[[], Results]]]:
    """Each case on a master of its own."""

    def on_master(case: str) -> Results:
        with venvs.mooncake(venv) as (address, environ):
            return venvs.ask(venv, "mooncake_peer.py", case, address, environ=environ)

    def load() -> Results:
        with venvs.mooncake(venv) as (address, _):
            rates = {}
            for clients in (1, CLIENTS):
                running = [venvs.start(venv, "mooncake_peer.py", "load", address) for _ in range(clients)]
                rates[clients] = sum(venvs.answer(process)["lookups a second"] for process in running)
        return {f"lookups a second, {clients} clients": rate for clients, rate in rates.items()}

    for case in ("lookup", "pages", "evict", "kill"):
        yield case, lambda case=case: on_master(case)
    yield "load", load


def peers(skipped: dict[str, str]) -> Iterator[tuple[str, Iterator[tuple[str, Callable[[], Results]]]]]:
    """Every peer that can be had."""
    wanted = {"mooncake": venvs.MOONCAKE, "lmcache": (venvs.LMCACHE,)}
    for name, wheels in wanted.items():
        try:
            venv = venvs.environment(name, wheels)
        except Unavailable as error:
            skipped[name] = str(error)
            print(f"SKIPPED {name}: {error}", flush=True)
            continue
        if name == "lmcache":
            for transport in ("zmq", "grpc"):
                yield f"LMCache {transport}", lmcache_cases(venv, transport)
        else:
            yield "Mooncake", mooncake_cases(venv)


def ratios(mine: Results, theirs: Results, of: str = "p50_us") -> dict[str, float]:
    """Where both have a figure; above 1 we are faster. `of`: which figure of a series of calls."""
    found = {}
    for name, value in mine.items():
        other = theirs.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            found[name] = round(other[of] / value[of], 2)
        elif name.startswith("lookups a second") and other:
            found[name] = round(value / other, 2)
        elif name == "kill s" and other:
            found[name] = round(other / value, 2)
    for name, value in mine.items():
        plain = name.removesuffix(" from ids").removesuffix(" in a row")
        if plain != name and isinstance(theirs.get(plain), dict):
            found[name] = round(theirs[plain][of] / value[of], 2)
    return found


def _run(name: str, cases: Iterator[tuple[str, Callable[[], Results]]], skipped: dict[str, str]) -> Results:
    report: Results = {}
    for case, measure in cases:
        began = time.monotonic()
        try:
            report |= measure()
        except Unavailable as error:
            skipped[f"{name}: {case}"] = str(error)
            print(f"SKIPPED {name}, {case}: {error}", flush=True)
        else:
            print(f"{name}, {case}: {time.monotonic() - began:.0f} s", flush=True)
    return report


def main() -> None:
    """Writes the JSON file and prints a line a ratio."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    parser.add_argument("--json", type=Path, default=venvs.BUILD / "peers.json")
    parser.add_argument("--cases", default="", help="only these of ours, with commas between them")
    options = parser.parse_args()
    chosen = options.cases.split(",") if options.cases else [*ours.CASES]
    skipped: dict[str, str] = {}
    load_before = os.getloadavg()[0]
    own = _run("kvmanager", ((case, lambda case=case: ours.measure(case)) for case in chosen), skipped)
    results: dict[str, Results] = {"kvmanager": own}
    compared: dict[str, dict[str, float]] = {}
    least: dict[str, dict[str, float]] = {}
    for name, cases in peers(skipped):
        results[name] = _run(name, ((case, run) for case, run in cases if case in chosen), skipped)
        compared[name] = ratios(own, results[name])
        least[name] = ratios(own, results[name], "best_us")
        # After each peer: what was measured before something fails is kept.
        machine = {"cores": os.cpu_count(), "load_before": load_before, "load_after": os.getloadavg()[0]}
        told = {"machine": {**machine, "python": platform.python_version()}, "results": results}
        told |= {"ratios": compared, "ratios_of_the_least": least}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**told, "skipped": skipped}, indent=1) + "\n", encoding="utf-8")
    for name, found in compared.items():
        for what, ratio in found.items():
            best = least[name].get(what, ratio)
            print(f"{what:<36} {ratio:>8.2f} x faster than {name}; {best:.2f} x by the least of each")
    print(json.dumps({"ours": own, "skipped": skipped}))


if __name__ == "__main__":
    main()
