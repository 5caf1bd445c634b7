"""BL-26: two images behind the same text never share KV, however alike their ids end.

An engine puts its media ids into the token ids that it makes keys of: all 32 bits of several tokens an item, at the
place of the item, so that nothing is cut and nothing is added to a key that was made without it.
"""

import hashlib

import numpy as np
import pytest

from kvmanager.clients.keys import KeyChain
from kvmanager.core.events import Open
from kvmanager.protos import kvmanager_pb2 as pb
from tests.sim.bytes_driver import BytesClient, start

ROWS, RANKS = 4, 2
SPAN = ROWS * RANKS
NAMESPACE = pb.Namespace(
    model="m", weights_revision="1", kv_format="f", key_hash="sha256", key_bytes=16, key_tokens=ROWS
)
TEXT = np.arange(1000, 1040)
"""Forty tokens of text."""


def with_media(at: int, media: bytes, items: int = 8) -> np.ndarray:
    """The text with the placeholders of a media item replaced by its digest, from position `at` on."""
    tokens = TEXT.copy()
    tokens[at : at + items] = np.frombuffer(hashlib.sha256(media).digest(), "<u4")[:items]
    return tokens


def keys(tokens: np.ndarray) -> bytes:
    return KeyChain(NAMESPACE).extend(tokens)


def found(client: BytesClient, request_id: int, tokens: np.ndarray) -> int:
    """Tokens found for a prompt, which is computed, committed and closed."""
    opened = client.step(opens=(Open(request_id, len(tokens), 0, keys(tokens)),)).opened[0]
    client.commit(request_id, len(tokens))
    client.close(request_id)
    client.run()
    client.driver.end_all()
    return opened.cached_tokens


PAIRS = [
    (bytes.fromhex("000000000000abcd"), bytes.fromhex("000000001111abcd")),  # equal in the low 16 bits
    (bytes.fromhex("000000002222abcd"), bytes.fromhex("111111112222abcd")),  # equal in the low 32 bits
]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("at", [0, 16, 18, 21])
def test_nothing_is_shared_from_the_first_media_token_on(pair: tuple[bytes, bytes], at: int) -> None:
    """`at` 18 and 21: the item starts inside a segment, 21 also inside its span."""
    driver, client = start(16, 0, ranks=RANKS, page_rows=ROWS)
    first, second = (with_media(at, media) for media in pair)
    assert found(client, 1, first) == 0
    assert found(client, 2, second) == at // ROWS * ROWS, "the text before it is shared, and no more"
    assert found(client, 3, first) == 36, "the same image is found: all but the last segment"
    assert found(client, 4, second) == 36
    driver.leave(client)


def test_the_same_image_at_another_place_is_another_prefix() -> None:
    driver, client = start(16, 0, ranks=RANKS, page_rows=ROWS)
    media = PAIRS[0][0]
    assert found(client, 1, with_media(16, media)) == 0
    assert found(client, 2, with_media(20, media)) == 16
    driver.leave(client)


def test_the_ids_are_whole() -> None:
    """32 bits of every token reach the key: a difference in the top bit alone is one."""
    low, high = TEXT.copy(), TEXT.astype(np.uint32)
    high[3] |= 1 << 31
    assert keys(low)[:16] != keys(high)[:16]
