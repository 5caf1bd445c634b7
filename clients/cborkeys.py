"""vLLM's chain of block hashes, `sha256_cbor`: the same in every process and language.

    h_0 = H(seed)        h_i = H([h_{i-1}, [token ids of block i], null])

H is sha256 over canonical CBOR (RFC 8949, section 4.2). The seed is a text: PYTHONHASHSEED where that is set, else a
fixed one. The null stands where blocks with images, adapters or a salt have more; such blocks are not made here.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Final

import numpy as np
import numpy.typing as npt

NONE_TEXT: Final = "vllm-none-hash"
_TEXT, _ARRAY = 3 << 5, 4 << 5
_LAST_KEY: Final = b"\x83\x58\x20"
"""An array of three, whose first is a string of 32 bytes."""
_NULL: Final = b"\xf6"


def none_hash(seed: str = "") -> bytes:
    """What a chain begins with; "": vLLM's fixed text."""
    text = (seed or NONE_TEXT).encode()
    return hashlib.sha256(_head(_TEXT, len(text)) + text).digest()


def chained(last: bytes, segments: bytes | memoryview, width: int, key_bytes: int) -> bytes:
    """Keys of `segments` (each `width` bytes of little-endian u32 token ids) after the key `last`, concatenated."""
    assert key_bytes == hashlib.sha256().digest_size
    if not segments:
        return b""
    tokens = np.frombuffer(segments, "<u4")
    text, ends = encoded(tokens)
    count = width // 4
    head = _head(_ARRAY, count)
    bounds = [0, *ends[count - 1 :: count].tolist()]
    made = []
    for start, stop in itertools.pairwise(bounds):
        last = hashlib.sha256(b"".join((_LAST_KEY, last, head, text[start:stop], _NULL))).digest()
        made.append(last)
    return b"".join(made)


def encoded(tokens: npt.NDArray[np.uint32]) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Token ids as CBOR integers one after the other, and where each ends (int64[tokens])."""
    sizes = np.where(tokens < 24, 1, np.where(tokens < 1 << 8, 2, np.where(tokens < 1 << 16, 3, 5)))
    ends = np.cumsum(sizes, dtype=np.int64)
    text = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = ends - sizes
    heads = np.where(sizes == 1, tokens & 0xFF, np.where(sizes == 2, 24, np.where(sizes == 3, 25, 26)))
    text[starts] = heads.astype(np.uint8)
    for size in (2, 3, 5):
        which = sizes == size
        for place in range(1, size):
            text[starts[which] + place] = (tokens[which] >> np.uint32(8 * (size - 1 - place))) & np.uint32(0xFF)
    return text.tobytes(), ends


def _head(kind: int, number: int) -> bytes:
    """A type and its number in the fewest bytes."""
    text, _ = encoded(np.array([number], np.uint32))
    return bytes([kind | text[0]]) + text[1:]
