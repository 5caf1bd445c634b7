"""What the daemon keeps of its clients with the core's own state, so that the next daemon knows them again."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from kvmanager.core.state import State
from kvmanager.daemon.attach import ClientIdentity
from kvmanager.protos import kvmanager_pb2 as pb


@dataclass(frozen=True)
class ClientNote:
    """An attached process: its token, and what makes it this process and no other."""

    token: str
    uid: int
    pid: int
    started: int
    role: str
    name: str

    @classmethod
    def of(cls, identity: ClientIdentity) -> ClientNote:
        """What is kept of an identity."""
        return cls(
            identity.token, identity.uid, identity.pid, identity.started, identity.role, identity.name
        )


@dataclass(frozen=True)
class EngineNote:
    """The scheduler of an epoch, and the namespace that it registered with."""

    client: ClientNote
    namespace: pb.Namespace

    def stored(self) -> bytes:
        """For `RegisterEngine.note`."""
        namespace = base64.b64encode(self.namespace.SerializeToString()).decode()
        return json.dumps({"client": asdict(self.client), "namespace": namespace}).encode()

    @classmethod
    def read(cls, stored: bytes) -> EngineNote:
        """What `stored` wrote."""
        fields = json.loads(stored)
        return cls(ClientNote(**fields["client"]), pb.Namespace.FromString(base64.b64decode(fields["namespace"])))


@dataclass(frozen=True)
class RankNote:
    """The process of an attached rank, its timeline word and the regions that it may map."""

    client: ClientNote
    word: int
    regions: tuple[int, ...]

    def stored(self) -> bytes:
        """For `AttachRank.note`."""
        return json.dumps({"client": asdict(self.client), "word": self.word, "regions": self.regions}).encode()

    @classmethod
    def read(cls, stored: bytes) -> RankNote:
        """What `stored` wrote."""
        fields = json.loads(stored)
        return cls(ClientNote(**fields["client"]), fields["word"], tuple(fields["regions"]))


def clients_of(state: State) -> Iterator[ClientNote]:
    """Every client that the state names, perhaps more than once."""
    for engine in state.all_engines():
        yield EngineNote.read(engine.note).client
        for note in engine.attach_notes.values():
            yield RankNote.read(note).client
