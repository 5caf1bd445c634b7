"""Chained keys: by hand, incrementally, and the same in every process."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from kvmanager.clients.keys import KeyChain, namespace_seed
from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb

SEED = 20


def make_namespace(**changes: object) -> pb.Namespace:
    fields: dict[str, object] = {
        "model": "glm-tiny",
        "weights_revision": "seed:1",
        "kv_format": "tiny",
        "key_hash": "sha256",
        "key_bytes": 16,
        "key_tokens": 16,
    }
    return pb.Namespace(**(fields | changes))  # type: ignore[arg-type]


def test_keys_by_hand() -> None:
    namespace = make_namespace()
    tokens = np.arange(40)
    chain = KeyChain(namespace)
    made = chain.extend(tokens)
    first = hashlib.sha256(namespace_seed(namespace) + tokens[:16].astype("<u4").tobytes()).digest()[:16]
    second = hashlib.sha256(first + tokens[16:32].astype("<u4").tobytes()).digest()[:16]
    assert made == first + second == chain.keys
    assert (chain.segments, chain.tokens) == (2, 40)


def test_pieces_give_the_same_keys_as_the_whole() -> None:
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(0, 2**32, 500, dtype=np.uint64)
    whole = KeyChain(make_namespace(key_bytes=32)).extend(tokens)
    for cuts in (rng.choice(500, 20, replace=False), np.arange(500), np.array([16, 32])):
        chain = KeyChain(make_namespace(key_bytes=32))
        pieces = [chain.extend(piece) for piece in np.split(tokens, np.sort(cuts))]
        assert b"".join(pieces) == whole == chain.keys, f"seed {SEED}"
    assert len(whole) == 31 * 32


def test_a_changed_token_changes_every_later_key_and_no_earlier_one() -> None:
    tokens = np.arange(64)
    other = tokens.copy()
    other[20] += 1
    a, b = KeyChain(make_namespace()).extend(tokens), KeyChain(make_namespace()).extend(other)
    assert [a[i : i + 16] == b[i : i + 16] for i in range(0, 64, 16)] == [True, False, False, False]


@pytest.mark.parametrize("field", ["model", "weights_revision", "kv_format"])
def test_namespaces_never_share_a_key(field: str) -> None:
    tokens = np.arange(16)
    assert KeyChain(make_namespace()).extend(tokens) != KeyChain(make_namespace(**{field: "other"})).extend(tokens)


def test_fields_can_not_run_into_one_another() -> None:
    a = make_namespace(model="ab", weights_revision="c")
    b = make_namespace(model="a", weights_revision="bc")
    assert namespace_seed(a) != namespace_seed(b)


def test_keys_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    code = (
        "import numpy as np\n"
        "from kvmanager.clients.keys import KeyChain\n"
        "from kvmanager.protos import kvmanager_pb2 as pb\n"
        "namespace = pb.Namespace(model='glm-tiny', weights_revision='seed:1', kv_format='tiny',"
        " key_hash='sha256', key_bytes=16, key_tokens=16)\n"
        "print(KeyChain(namespace).extend(np.arange(32)).hex())"
    )
    here = KeyChain(make_namespace()).extend(np.arange(32)).hex()
    for seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert result.stdout.strip() == here


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"key_hash": "vllm_sha256"}, "vllm_sha256"),
        ({"key_hash": "sha256_cbor"}, "16"),
        ({"key_hash": ""}, "''"),
        ({"key_bytes": 20}, "20"),
        ({"key_tokens": 0}, "key_tokens 0"),
    ],
)
def test_namespaces_that_can_not_be_served_are_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        KeyChain(make_namespace(**changes))


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        (np.array([1, -1]), "-1"),
        (np.array([1 << 32]), "4294967296"),
        (np.array([0.5]), "float64"),
        (np.array([[1]]), "vector"),
    ],
)
def test_token_ids_that_do_not_fit_are_refused(tokens: np.ndarray, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        KeyChain(make_namespace()).extend(tokens)


def cbor_of(value: object) -> bytes:
    """Canonical CBOR, an item at a time."""

    def head(kind: int, number: int) -> bytes:
        if number < 24:
            return bytes([kind << 5 | number])
        for info, size in ((24, 1), (25, 2), (26, 4)):
            if number < 1 << 8 * size:
                return bytes([kind << 5 | info]) + number.to_bytes(size, "big")
        raise AssertionError(number)

    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return head(0, value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value)) + value.encode()
    assert isinstance(value, list)
    return head(4, len(value)) + b"".join(map(cbor_of, value))


@pytest.mark.parametrize("key_tokens", [1, 16, 23, 24, 255, 256, 512])
@pytest.mark.parametrize("hash_seed", ["", "0", "a longer seed than twenty-four bytes"])
def test_vllms_keys_by_hand(key_tokens: int, hash_seed: str) -> None:
    rng = np.random.default_rng(SEED)
    edges = [0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1]
    tokens = np.concatenate([edges, rng.integers(0, 2**18, 3 * key_tokens)])
    chain = KeyChain(make_namespace(key_hash="sha256_cbor", key_bytes=32, key_tokens=key_tokens, hash_seed=hash_seed))
    pieces = [chain.extend(piece) for piece in np.array_split(tokens, 5)]
    last = hashlib.sha256(cbor_of(hash_seed or "vllm-none-hash")).digest()
    wanted = []
    for at in range(0, len(tokens) // key_tokens * key_tokens, key_tokens):
        last = hashlib.sha256(cbor_of([last, tokens[at : at + key_tokens].tolist(), None])).digest()
        wanted.append(last)
    assert b"".join(pieces) == b"".join(wanted) == chain.keys, f"seed {SEED}"


def test_a_chain_gives_the_token_ids_of_its_whole_segments_where_the_namespace_asks_for_them() -> None:
    tokens = np.random.default_rng(SEED).integers(0, 2**32, 100, dtype=np.uint64)
    text = tokens.astype("<u4").tobytes()
    chain, silent = KeyChain(make_namespace(token_ids=True)), KeyChain(make_namespace())
    at = 0
    for piece in np.split(tokens, [3, 16, 17, 70, 99]):
        made = chain.extend(piece)
        assert chain.token_ids(made) == text[at : at + len(made) // 16 * 64]
        assert silent.token_ids(silent.extend(piece)) == b""
        at += len(made) // 16 * 64
    assert chain.token_ids() == text[: 96 * 4]
    assert silent.token_ids() == b""
    assert chain.keys == silent.keys, "what is told decides nothing about a key"
