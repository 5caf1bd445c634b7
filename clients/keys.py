"""Chained segment keys, made at the client from token ids as they come.

    key_0 = H(seed || tokens_0)        key_i = H(key_{i-1} || tokens_i)

`tokens_i` are the segment's token ids as little-endian u32; H is sha256 cut to `key_bytes`; the
seed is the digest of what the key means, so equal tokens of two models never share a key. A key
names the whole prefix up to the end of its segment. That is `key_hash` "sha256". "sha256_cbor" makes vLLM's
keys (`cborkeys.py`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.clients import cborkeys
from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb

TokenArray = npt.NDArray[np.integer]

KEY_HASHES: Final = ("sha256", "sha256_cbor")
"""Those that are made here."""
FEW_TOKENS: Final = 16
"""So many are packed faster without an array operation."""
KEY_BYTES: Final = (16, 32)
"""Widths a namespace may ask for."""


def namespace_seed(namespace: pb.Namespace) -> bytes:
    """sha256 over the namespace's fields, each with its name and length, so that no two spell alike."""
    digest = hashlib.sha256(b"kvmanager/keys/1")
    fields: Iterable[tuple[str, str]] = (
        ("model", namespace.model),
        ("weights_revision", namespace.weights_revision),
        ("kv_format", namespace.kv_format),
        ("key_tokens", str(namespace.key_tokens)),
    )
    for name, value in fields:
        for part in (name.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def probe_key(namespace: pb.Namespace) -> bytes:
    """The last key of two segments whose token i is 77 i + 3: what the daemon compares with its own at registration.

    Empty for a hash that is not made here. Raises InvalidArgument as KeyChain does.
    """
    if namespace.key_hash not in KEY_HASHES:
        return b""
    chain = KeyChain(namespace)
    return chain.extend(77 * np.arange(2 * namespace.key_tokens) + 3)[-namespace.key_bytes :]


class KeyChain:
    """The keys of one growing token sequence; tokens short of a whole segment wait for the next call."""

    def __init__(self, namespace: pb.Namespace) -> None:
        """An empty sequence.

        Raises InvalidArgument for a hash that is not made here, a width that is neither 16 nor 32
        bytes (of "sha256_cbor": not 32), or a segment of no tokens.
        """
        cbor = namespace.key_hash == "sha256_cbor"
        if namespace.key_hash not in KEY_HASHES:
            made = " or ".join(map(repr, KEY_HASHES))
            raise InvalidArgument(f"key_hash {namespace.key_hash!r} is not made here; use {made}")
        if namespace.key_bytes not in KEY_BYTES[cbor:]:
            raise InvalidArgument(f"key_bytes {namespace.key_bytes} is not served; use one of {KEY_BYTES[cbor:]}")
        if namespace.key_tokens < 1:
            raise InvalidArgument(f"key_tokens {namespace.key_tokens}: a segment has at least 1 token")
        self.key_bytes = namespace.key_bytes
        self.key_tokens = namespace.key_tokens
        self._last = cborkeys.none_hash(namespace.hash_seed) if cbor else namespace_seed(namespace)
        self._chained = cborkeys.chained if cbor else _chained
        self._tells_ids = namespace.token_ids
        self._token_ids = bytearray()
        self._tail = b""
        self._keys = bytearray()

    def extend(self, tokens: TokenArray) -> bytes:
        """Keys of the segments that `tokens` complete, concatenated (empty when none).

        `tokens`: integers[n] in [0, 2**32). Raises InvalidArgument for others.
        """
        text = memoryview(_as_u32(tokens))
        width = self.key_tokens * 4
        if len(self._tail) + len(text) < width:  # a decode step's few tokens
            self._tail += text
            return b""
        first = b""
        if self._tail:
            missing = width - len(self._tail)
            self._tail, text = self._tail + bytes(text[:missing]), text[missing:]
            if len(self._tail) < width:
                return b""
            first, self._tail = self._tail, b""
        whole = len(text) // width * width
        made = b""
        for part in (first, text[:whole]):
            made += self._chained(made[-self.key_bytes :] or self._last, part, width, self.key_bytes)
        self._tail = bytes(text[whole:])
        if self._tells_ids:
            self._token_ids += first
            self._token_ids += text[:whole]
        if made:
            self._last = made[-self.key_bytes :]
            self._keys += made
        return made

    @property
    def keys(self) -> bytes:
        """All keys so far, concatenated."""
        return bytes(self._keys)

    def token_ids(self, keys: bytes | None = None) -> bytes:
        """u32 ids of the segments that the last `keys` (as `extend` gave them; None: all) are of.

        Empty where the namespace does not ask for them.
        """
        if keys is None:
            return bytes(self._token_ids)
        count = len(keys) // self.key_bytes * self.key_tokens * 4
        return bytes(self._token_ids[len(self._token_ids) - count :]) if self._tells_ids else b""

    @property
    def segments(self) -> int:
        """Whole segments so far."""
        return len(self._keys) // self.key_bytes

    @property
    def tokens(self) -> int:
        """Tokens seen so far, those of the unfinished segment included."""
        return self.segments * self.key_tokens + len(self._tail) // 4


def _chained(last: bytes, segments: bytes | memoryview, width: int, key_bytes: int) -> bytes:
    """Keys of `segments` (each `width` bytes) after the key or seed `last`, concatenated.

    Each key needs the one before it, so this loop can't be spread; two calls of hashlib a segment are all it does.
    """
    sha256 = hashlib.sha256
    made = []
    for (segment,) in struct.iter_unpack(f"{width}s", segments):
        last = sha256(last + segment).digest()[:key_bytes]
        made.append(last)
    return b"".join(made)


def _as_u32(tokens: TokenArray) -> bytes:
    """`tokens` as packed little-endian u32, refused where that would change a value."""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(f"token ids must be a vector of integers, not {array.dtype}{list(array.shape)}")
    if len(array) <= FEW_TOKENS:
        try:
            return struct.pack(f"<{len(array)}I", *array.tolist())
        except struct.error:
            pass  # said below, with the token
    # All bits that occur: a negative one has the sign's, a large one those above 32.
    if array.size and int(np.bitwise_or.reduce(array)) >> 32:
        bad = array[(array < 0) | (array >> 32 != 0)]
        raise InvalidArgument(f"token id {int(bad[0])} does not fit 32 bits")
    return array.astype("<u4").tobytes()
