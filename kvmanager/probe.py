"""The daemon's own key of a prompt that never changes: an engine whose keys differ would store and never find.

Written apart from the clients' way of making keys, on purpose: each checks the other at every registration.
"""

from __future__ import annotations

import hashlib
from typing import Final

from kvmanager.errors import InvalidArgument, LayoutMismatch
from kvmanager.protos import kvmanager_pb2 as pb

PROBE_SEGMENTS: Final = 2
MOST_KEY_TOKENS: Final = 65_536
"""Most tokens of a segment: a probe is made of two."""


def probe_key(namespace: pb.Namespace) -> bytes:
    """The last key of the probe prompt, whose token i is 77 i + 3, two segments long.

    For `key_hash` "sha256". Raises InvalidArgument for a segment of no tokens, or of more than MOST_KEY_TOKENS.
    """
    tokens = namespace.key_tokens
    if not 1 <= tokens <= MOST_KEY_TOKENS:
        raise InvalidArgument(f"namespace.key_tokens is {tokens}; a segment has 1 to {MOST_KEY_TOKENS} tokens")
    seed = hashlib.sha256(b"kvmanager/keys/1")
    for name in ("model", "weights_revision", "kv_format", "key_tokens"):
        for text in (name, str(getattr(namespace, name))):
            seed.update(len(text.encode()).to_bytes(8, "little") + text.encode())
    key = seed.digest()
    for first in range(0, PROBE_SEGMENTS * tokens, tokens):
        segment = b"".join((77 * i + 3).to_bytes(4, "little") for i in range(first, first + tokens))
        key = hashlib.sha256(key + segment).digest()[: namespace.key_bytes]
    return key


def check_probe(namespace: pb.Namespace, theirs: bytes) -> None:
    """Raises LayoutMismatch, with both keys, unless the engine makes the keys that this daemon does.

    Only keys of "sha256" are made here; others are the engine's affair.
    """
    if namespace.key_hash != "sha256":
        return
    ours = probe_key(namespace)
    if theirs != ours:
        raise LayoutMismatch(
            f"probe_key is {theirs.hex() or 'missing'}, this daemon makes {ours.hex()} for the same prompt: what one "
            "stores the other would never find; use the clients of this version"
        )
