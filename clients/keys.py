"""Chained segment keys, made at the client from token ids as they come.

    key_0 = H(seed || tokens_0)        key_i = H(key_{i-1} || tokens_i)

`tokens_i` are the segment's token ids as little-endian u32; H is sha256 cut to `key_bytes`; the
seed is the digest of what the key means, so equal tokens of two models never share a key. A key
names the whole prefix up to the end of its segment.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb

TokenArray = npt.NDArray[np.integer]

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
    if namespace.key_hash != "sha256":
        return b""
    chain = KeyChain(namespace)
    return chain.extend(77 * np.arange(2 * namespace.key_tokens) + 3)[-namespace.key_bytes :]


class KeyChain:
    """The keys of one growing token sequence; tokens short of a whole segment wait for the next call."""

    def __init__(self, namespace: pb.Namespace) -> None:
        """An empty sequence.

        Raises InvalidArgument for a hash that is not "sha256", a width that is neither 16 nor 32
        bytes, or a segment of no tokens.
        """
        if namespace.key_hash != "sha256":
            raise InvalidArgument(f"key_hash {namespace.key_hash!r} is not made here yet; use 'sha256'")
        if namespace.key_bytes not in KEY_BYTES:
            raise InvalidArgument(f"key_bytes {namespace.key_bytes} is not served; use one of {KEY_BYTES}")
        if namespace.key_tokens < 1:
            raise InvalidArgument(f"key_tokens {namespace.key_tokens}: a segment has at least 1 token")
        self.key_bytes = namespace.key_bytes
        self.key_tokens = namespace.key_tokens
        self._last = namespace_seed(namespace)
        self._tail = b""
        self._keys = bytearray()

    def extend(self, tokens: TokenArray) -> bytes:
        """Keys of the segments that `tokens` complete, concatenated (empty when none).

        `tokens`: integers[n] in [0, 2**32). Raises InvalidArgument for others.
        """
        array = _as_u32(tokens)
        text = array.view(np.uint8).data if len(array) else memoryview(b"")
        width = self.key_tokens * 4
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
            made += _chained(made[-self.key_bytes :] or self._last, part, width, self.key_bytes)
        self._tail = bytes(text[whole:])
        if made:
            self._last = made[-self.key_bytes :]
            self._keys += made
        return made

    @property
    def keys(self) -> bytes:
        """All keys so far, concatenated."""
        return bytes(self._keys)

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


def _as_u32(tokens: TokenArray) -> npt.NDArray[np.uint32]:
    """`tokens` as little-endian u32, refused where that would change a value."""
    array = np.asarray(tokens)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidArgument(f"token ids must be a vector of integers, not {array.dtype}{list(array.shape)}")
    # All bits that occur: a negative one has the sign's, a large one those above 32.
    if array.size and int(np.bitwise_or.reduce(array)) >> 32:
        bad = array[(array < 0) | (array >> 32 != 0)]
        raise InvalidArgument(f"token id {int(bad[0])} does not fit 32 bits")
    return array.astype("<u4")
