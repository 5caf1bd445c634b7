"""Both sides check at the start that they make the same keys."""

import pytest

from kvmanager.clients import keys
from kvmanager.daemon.probe import MOST_KEY_TOKENS, probe_key
from kvmanager.errors import InvalidArgument, LayoutMismatch
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.messages import register_event


def namespace(**changes: object) -> pb.Namespace:
    fields = {"model": "m", "weights_revision": "é1", "kv_format": "f", "key_hash": "sha256", "key_bytes": 16}
    return pb.Namespace(**{**fields, "key_tokens": 64, **changes})


def request(probe: bytes, **changes: object) -> pb.RegisterRequest:
    return pb.RegisterRequest(engine="e", group="g", namespace=namespace(**changes), ranks=1, probe_key=probe)


@pytest.mark.parametrize("key_bytes", [16, 32])
@pytest.mark.parametrize("key_tokens", [1, 16, 64, 512])
def test_client_and_daemon_make_the_same_key_in_their_own_ways(key_bytes: int, key_tokens: int) -> None:
    ours = probe_key(namespace(key_bytes=key_bytes, key_tokens=key_tokens))
    assert len(ours) == key_bytes
    assert keys.probe_key(namespace(key_bytes=key_bytes, key_tokens=key_tokens)) == ours


def test_whatever_keys_mean_is_in_the_probe() -> None:
    changed = [{"model": "n"}, {"weights_revision": "e1"}, {"kv_format": "g"}, {"key_tokens": 65}, {"key_bytes": 32}]
    assert len({probe_key(namespace(**fields)) for fields in [{}, *changed]}) == 1 + len(changed)


def test_an_engine_with_other_keys_is_refused_and_told_both() -> None:
    ours = probe_key(namespace())
    register_event(request(ours), "t")
    theirs = bytes(16)
    with pytest.raises(LayoutMismatch, match=f"{theirs.hex()}.*{ours.hex()}"):
        register_event(request(theirs), "t")
    with pytest.raises(LayoutMismatch, match="missing"):
        register_event(request(b""), "t")
    with pytest.raises(LayoutMismatch):
        register_event(request(ours, weights_revision="other"), "t")


@pytest.mark.parametrize("hash_seed", ["", "42"])
@pytest.mark.parametrize("key_tokens", [1, 16, 512, 1024])
def test_vllms_keys_are_made_alike_and_checked_where_the_engine_makes_them(key_tokens: int, hash_seed: str) -> None:
    fields: dict[str, object] = {"key_hash": "sha256_cbor", "key_bytes": 32, "key_tokens": key_tokens}
    fields["hash_seed"] = hash_seed
    ours = probe_key(namespace(**fields))
    assert keys.probe_key(namespace(**fields)) == ours
    register_event(request(ours, **fields), "t")
    with pytest.raises(LayoutMismatch):
        register_event(request(bytes(32), **fields), "t")
    with pytest.raises(LayoutMismatch):
        register_event(request(ours, **{**fields, "hash_seed": "43"}), "t")


def test_keys_that_only_the_engine_makes_are_not_checked() -> None:
    assert keys.probe_key(namespace(key_hash="vllm_sha256")) == b""
    register_event(request(b"", key_hash="vllm_sha256"), "t")
    register_event(request(b"", key_hash="sha256_cbor", key_bytes=32), "t")


@pytest.mark.parametrize("tokens", [0, MOST_KEY_TOKENS + 1])
def test_segments_that_no_probe_is_made_of(tokens: int) -> None:
    with pytest.raises(InvalidArgument, match="key_tokens"):
        register_event(request(b"", key_tokens=tokens), "t")
