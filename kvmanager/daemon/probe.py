"""The daemon's own key of a prompt that never changes: an engine whose keys differ would store and never find.

Written apart from the clients' way of making keys, on purpose: each checks the other at every registration.
"""

from __future__ import annotations

import hashlib
from typing import Final

from kvmanager.errors import InvalidArgument, LayoutMismatch
from kvmanager.protos import kvmanager_pb2 as pb

PROBE_SEGMENTS: Final = 2
NONE_TEXT: Final = "vllm-none-hash"
MOST_KEY_TOKENS: Final = 65_536
"""Most tokens of a segment: a probe is made of two."""


def probe_key(namespace: pb.Namespace) -> bytes:
    """The last key of the probe prompt, whose token i is 77 i + 3, two segments long.

    For `key_hash` "sha256" and "sha256_cbor". Raises InvalidArgument for a segment of no tokens, or of
    more than MOST_KEY_TOKENS.
    """
    tokens = namespace.key_tokens
    if not 1 <= tokens <= MOST_KEY_TOKENS:
        raise InvalidArgument(f"namespace.key_tokens is {tokens}; a segment has 1 to {MOST_KEY_TOKENS} tokens")
    if namespace.key_hash == "sha256_cbor":
        return _cbor_probe_key(namespace.hash_seed or NONE_TEXT, tokens)
    seed = hashlib.sha256(b"kvmanager/keys/1")
    for name in ("model", "weights_revision", "kv_format", "key_tokens"):
        for text in (name, str(getattr(namespace, name))):
            seed.update(len(text.encode()).to_bytes(8, "little") + text.encode())
    key = seed.digest()
    for first in range(0, PROBE_SEGMENTS * tokens, tokens):
        segment = b"".join((77 * i + 3).to_bytes(4, "little") for i in range(first, first + tokens))
        key = hashlib.sha256(key + segment).digest()[: namespace.key_bytes]
    return key


def _cbor_probe_key(seed: str, tokens: int) -> bytes:
    """The chain of vLLM: sha256 over canonical CBOR, of the seed's text and then of [key before, [token ids], null]."""
    key = hashlib.sha256(_cbor(seed)).digest()
    for first in range(0, PROBE_SEGMENTS * tokens, tokens):
        key = hashlib.sha256(_cbor([key, [77 * i + 3 for i in range(first, first + tokens)], None])).digest()
    return key


def _cbor(value: object) -> bytes:
    match value:
        case None:
            return b"\xf6"
        case int():
            return _cbor_head(0, value)
        case bytes():
            return _cbor_head(2, len(value)) + value
        case str():
            return _cbor_head(3, len(value.encode())) + value.encode()
        case list():
            return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))
    raise AssertionError(f"a probe has no {type(value).__name__}")


def _cbor_head(kind: int, number: int) -> bytes:
    """A type and its number in the fewest bytes (RFC 8949, section 4.2)."""
    if number < 24:
        return bytes([kind << 5 | number])
    size = next(size for size in (1, 2, 4, 8) if number < 1 << 8 * size)
    return bytes([kind << 5 | 23 + size.bit_length()]) + number.to_bytes(size, "big")


def check_probe(namespace: pb.Namespace, theirs: bytes) -> None:
    """Raises LayoutMismatch, with both keys, unless the engine makes the keys that this daemon does.

    Keys of "sha256_cbor" may come from the engine's own program, which then gives no probe; all others but "sha256" do.
    """
    if not (namespace.key_hash == "sha256" or (namespace.key_hash == "sha256_cbor" and theirs)):
        return
    ours = probe_key(namespace)
    if theirs != ours:
        raise LayoutMismatch(
            f"probe_key is {theirs.hex() or 'missing'}, this daemon makes {ours.hex()} for the same prompt: what one "
            "stores the other would never find; use the clients of this version"
        )
