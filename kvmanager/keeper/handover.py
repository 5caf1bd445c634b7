"""How a process becomes a newer version of its program: execve, with its descriptors and what it knows.

The process id, the children and the open descriptors stay; the memory goes. What must be known is one JSON object
in a sealed memfd, whose number is in the environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Final, NoReturn

VARIABLE: Final = "KVMANAGER_KEEPER_STATE"
VERSION: Final = 1
"""Of the state; a program that reads another one starts as after a death of its predecessor."""
_log = logging.getLogger("kvmanager.keeper")
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def hand_over(module: str, state: Mapping[str, Any], fds: Iterable[int]) -> NoReturn:
    """Starts the program again as it was started, in this process, once a trial has imported its `module`.

    Raises OSError when that fails: go on then.
    """
    trial = subprocess.run([sys.executable, "-c", f"import {module}"], check=False, stdin=subprocess.DEVNULL)
    if trial.returncode != 0:
        raise OSError(f"the installed {module} can't be imported")
    memory = os.memfd_create("kvmanager:keeper-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    inherited = [memory, *fds]
    try:
        _write(memory, json.dumps({"version": VERSION, **state}).encode())
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        for fd in inherited:
            os.set_inheritable(fd, True)
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, VARIABLE: str(memory)})
    finally:
        for fd in inherited:
            os.set_inheritable(fd, False)
        os.close(memory)
    raise AssertionError("execve returns only with an error")


def _write(memory: int, content: bytes) -> None:
    with open(memory, "wb", closefd=False) as file:
        file.write(content)


def take_over(environment: MutableMapping[str, str]) -> dict[str, Any] | None:
    """What the program before left in this process, once; None at a first start.

    Call it first of all: a state that this version can't read is None as well, and all descriptors of the
    program before are closed then, as if it had died.
    """
    text = environment.pop(VARIABLE, None)
    if text is None:
        return None
    try:
        return _read(int(text))
    except (OSError, ValueError) as error:
        _log.error("the program before left what can't be read (%s); going on as after its death", error)
        close_all()
        return None


def _read(memory: int) -> dict[str, Any]:
    with open(memory, "rb") as file:
        file.seek(0)
        state = json.load(file)
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise ValueError(f"no state of version {VERSION}: {str(state)[:80]}")
    return state


def close_on_exec() -> None:
    """From now on no child inherits a descriptor beyond standard error unless it is meant to."""
    for fd in _open_fds():
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)


def close_all() -> None:
    """Closes every descriptor beyond standard error, whatever it is."""
    for fd in _open_fds():
        with contextlib.suppress(OSError):
            os.close(fd)


def _open_fds() -> list[int]:
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2]
