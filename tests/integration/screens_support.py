"""A node with many pages under load, and a real terminal of 80 columns to look at it: what `docs/screens.md` shows."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from nodes_support import GROUP, RANKS, WAIT_S, node_head

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.clients.keys import KeyChain
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import CapacityError
from kvmanager.layout import GLM53_TINY, native_layout
from kvmanager.protos import kvmanager_pb2 as pb

COLUMNS, LINES = 80, 44
PAGES = 20_000
ROW_PAGES = native_layout(GLM53_TINY, 1)
"""Pages of one row: as many pages as a true region has, in little memory."""


def many_pages_toml(runtime_dir: Path, *, name: str) -> str:
    """A prefill node of two ranks with `PAGES` pages in HBM, fewer on the host."""
    page_bytes = GLM53_TINY.page_bytes(1)
    return f"""{node_head(runtime_dir, name)}
[[group]]
name = "{GROUP}"
kind = "sharded"
format = "{GLM53_TINY.name}"
ranks = {RANKS}
page_rows = 1
interleave = 1
hbm_bytes_per_rank = {PAGES * page_bytes}
host_bytes_per_rank = {PAGES // 2 * page_bytes}
"""


class Load:
    """An engine in a thread of its own: prompts of changing length, some held open for a while."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self.done = 0
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(WAIT_S)
        assert self._failure is None, self._failure

    def wait(self, requests: int) -> None:
        """Returns when so many requests were served."""
        give_up = time.monotonic() + WAIT_S
        while self.done < requests:
            assert self._failure is None, self._failure
            assert time.monotonic() < give_up, self.done
            time.sleep(0.05)

    def _run(self) -> None:
        try:
            namespace = pb.Namespace()
            namespace.CopyFrom(NAMESPACE)
            namespace.key_tokens = 1
            engine = AttachedEngine(
                self._runtime_dir, "engine", group=GROUP, namespace=namespace, layouts=[ROW_PAGES], ranks=RANKS
            )
            with contextlib.closing(engine):
                self._serve(engine, namespace)
        except BaseException as error:
            self._failure = error

    def _serve(self, engine: AttachedEngine, namespace: pb.Namespace) -> None:
        held: list[int] = []
        while not self._over.is_set():
            number = self.done + 1
            tokens = tokens_of_turn(number)
            opened = pb.OpenRequest(
                request_id=number, prompt_tokens=len(tokens), prompt_keys=KeyChain(namespace).extend(tokens),
                session=pb.SessionHint(session_id=f"session-{number % 8}"),
            )  # fmt: skip
            with contextlib.suppress(CapacityError):
                engine.open(opened, timeout_s=5.0)
                engine.step([RequestStep(number, len(tokens), len(tokens))])
                held.append(number)
            self.done += 1
            closes = [pb.CloseRequest(request_id=each, reason=pb.FINISHED) for each in held[:-3]]
            engine.step(closes=closes)
            del held[:-3]
            self._over.wait(0.05)
        engine.step(closes=[pb.CloseRequest(request_id=each, reason=pb.FINISHED) for each in held])


def tokens_of_turn(number: int) -> list[int]:
    """Turn `number // 8` of one of eight sessions: each goes on from the one before."""
    session, turn = number % 8, number // 8
    return [session * 10_000 + place for place in range(400 + 300 * (turn % 10))]


class Terminal:
    """A tmux session of its own server, `COLUMNS` x `LINES`."""

    def __init__(self, directory: Path) -> None:
        self._tmux = ["tmux", "-S", str(directory / "tmux"), "-f", "/dev/null"]
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        self._call("new-session", "-d", *size, "env PS1='$ ' TERM=tmux-256color sh")

    def _call(self, *words: str) -> str:
        done = subprocess.run([*self._tmux, *words], capture_output=True, text=True, check=True)
        return done.stdout

    def type(self, line: str) -> None:
        """A line and Enter."""
        self._call("send-keys", "-l", line)
        self._call("send-keys", "Enter")

    def key(self, name: str) -> None:
        """One key, as tmux names it."""
        self._call("send-keys", name)

    def screen(self) -> str:
        """What stands there now."""
        return self._call("capture-pane", "-p").rstrip("\n")

    def wait(self, *patterns: str) -> str:
        """The screen once something on it matches each of these."""
        give_up = time.monotonic() + WAIT_S
        while not all(re.search(pattern, text := self.screen(), flags=re.M) for pattern in patterns):
            assert time.monotonic() < give_up, text
            time.sleep(0.1)
        return text

    def close(self) -> None:
        """Ends the server, and with it what runs in it."""
        self._call("kill-server")


@contextlib.contextmanager
def terminal(directory: Path) -> Iterator[Terminal]:
    """A terminal, closed at the end."""
    opened = Terminal(directory)
    try:
        yield opened
    finally:
        opened.close()


def command(*words: str) -> str:
    """`kvmanager WORDS` with this interpreter, as a shell takes it; the screen is empty before."""
    return "clear; " + shlex.join([sys.executable, "-m", "kvmanager.command.cli", *words])


