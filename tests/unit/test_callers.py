"""Tokens and roles of calls, and what is said again about a token that was recorded too late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvmanager.daemon.attach import ClientIdentity
from kvmanager.errors import KVError, Suspect, Unauthorized
from kvmanager.services.callers import Callers


class Identities:
    """Knows "good"; raises what it is told for others."""

    def __init__(self, error: KVError | None = None) -> None:
        self.error = error

    def identity_of(self, token: str) -> ClientIdentity:
        if self.error is not None:
            raise self.error
        return ClientIdentity(token, 1000, 1, 1, "engine", "e")


def context(*metadata: tuple[str, object]) -> SimpleNamespace:
    return SimpleNamespace(invocation_metadata=lambda: metadata)


def test_who_calls() -> None:
    callers = Callers(Identities())
    assert callers.who(context(("kvmanager-token", "good")), "peer", "engine").token == "good"
    with pytest.raises(Unauthorized, match="role 'engine' may not make this call; it is for peer, worker"):
        callers.who(context(("kvmanager-token", "good")), "peer", "worker")
    for metadata in ((), (("kvmanager-token", b"good"),), (("other", "good"),)):
        with pytest.raises(Unauthorized, match="no 'kvmanager-token' in the call's metadata"):
            callers.who(context(*metadata), "engine")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, []),
        (Suspect("broke"), [("disconnected", "t")]),
        (Unauthorized("gone"), [("disconnected", "t"), ("exited", "t")]),
    ],
)
def test_what_happened_while_a_token_was_recorded_is_said_again(error: KVError | None, said: list[object]) -> None:
    heard: list[object] = []
    Callers(Identities(error)).confirm(
        "t", lambda token: heard.append(("disconnected", token)), lambda token: heard.append(("exited", token))
    )
    assert heard == said
