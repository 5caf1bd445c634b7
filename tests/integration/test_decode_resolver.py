"""A decode engine through the resolver, on a real node: swap-in, mirrors, retraction and resumption, the same tokens.

What runs on a GPU in `tests/gpu/test_gpu_sparse_node.py`, here over the reference resolver.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from nodes_support import node
from sparse_node import check_account, decode_all, sparse_toml

from kvmanager.clients.decode_stores import StoresOf, reference_stores, stores_of


@pytest.mark.long
@pytest.mark.parametrize("stores", [reference_stores, stores_of], ids=["resolver", "map"])
def test_hisparse_rows_found_on_a_live_node_give_the_tokens_of_the_reference(tmp_path: Path, stores: StoresOf) -> None:
    with node(tmp_path, "decode", sparse_toml) as served:
        assert decode_all(served, stores) > 50
        check_account(served)
