"""BL-27: keys and namespaces are the same in every process, whatever its hash seed; so stores are found."""

import json
import os
import subprocess
import sys

import pytest

from kvmanager.core.events import Open
from kvmanager.services.messages import namespace_digest
from tests.sim.bytes_driver import BytesClient, start
from tests.sim.driver import Client

ROWS, RANKS = 4, 2
SPAN = ROWS * RANKS
PROBE = """
import json, numpy as np
from kvmanager.clients.keys import KeyChain
from kvmanager.services.messages import namespace_digest
from kvmanager.protos import kvmanager_pb2 as pb
ns = pb.Namespace(model="m", weights_revision="1", kv_format="f", key_hash="sha256", key_bytes=16, key_tokens=4)
chain = KeyChain(ns)
pieces = [chain.extend(part) for part in np.split(np.arange(48) * 77, [5, 6, 30])]
print(json.dumps([b"".join(pieces).hex(), namespace_digest("tenant", ns).hex()]))
"""


def probe(seed: str) -> tuple[bytes, bytes]:
    """Keys of a fixed prompt and the namespace's digest, made by a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
    )
    keys, digest = json.loads(found.stdout)
    return bytes.fromhex(keys), bytes.fromhex(digest)


def test_stored_by_one_process_found_by_another_after_a_restart() -> None:
    (keys, digest), (again, digest_again) = probe("1"), probe("4242")
    assert (keys, digest) == (again, digest_again)
    driver, client = start(16, 0, ranks=RANKS, page_rows=ROWS)
    client.die()
    for name, mine in (("e", digest), ("e", digest_again)):
        client = BytesClient(driver, "p", name, namespace=mine)
        opened = client.step(opens=(Open(1, 48, 0, keys),)).opened[0]
        client.write(opened, "probe", opened.cached_tokens, 48)
        client.read(opened, "probe", 48)
        client.commit(1, 48)
        client.run()
        client.die()
    assert opened.cached_tokens == 44
    driver.leave()


@pytest.mark.parametrize("extra", [None, ""])
def test_none_and_empty_are_the_same_namespace(extra: str | None) -> None:
    """A field that was not set and one set to nothing: writer and reader may spell it either way."""
    from kvmanager.protos import kvmanager_pb2 as pb

    fields = {"model": "m", "kv_format": "f", "key_hash": "sha256", "key_bytes": 16, "key_tokens": 4}
    plain = namespace_digest("t", pb.Namespace(**fields))
    spelled = pb.Namespace(**fields) if extra is None else pb.Namespace(**fields, weights_revision=extra)
    assert namespace_digest("t", spelled) == plain
    assert namespace_digest("t", pb.Namespace(**fields, weights_revision="2")) != plain


def test_another_namespace_never_finds_it() -> None:
    keys, digest = probe("7")
    driver, client = start(16, 0, ranks=RANKS, page_rows=ROWS)
    client.die()
    for mine, expected in ((digest, 0), (b"other" + digest[5:], 0), (digest, 44)):
        client = Client(driver, "p", namespace=mine)
        assert client.step(opens=(Open(1, 48, 0, keys),)).opened[0].cached_tokens == expected
        client.commit(1, 48)
        client.run()
        client.die()
    driver.leave()
