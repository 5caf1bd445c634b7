"""The audit log: one line for everything that an operator does, who did it and how it ended.

Lines of the logger `kvmanager.audit`, in the daemon's log; what changes the core is in the history, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from kvmanager.errors import KVError
from kvmanager.services.callers import Callers

_log = logging.getLogger("kvmanager.audit")


@contextmanager
def audited(callers: Callers, context: grpc.ServicerContext, what: str) -> Iterator[None]:
    """An operator does something: one line, also when it is refused. Raises Unauthorized for anybody else."""
    who = callers.who(context, "operator")
    by = f"uid {who.uid} pid {who.pid} ({who.name}): {what}"
    try:
        yield
    except KVError as error:
        _log.warning("%s: refused, %s", by, error)
        raise
    _log.warning("%s: done", by)
