"""Names that people write into `explain`: what is none is refused, and never reaches further."""

from __future__ import annotations

import pytest

from kvmanager.core.spec import Limits
from kvmanager.errors import InvalidArgument
from kvmanager.observing.explain import request_name
from kvmanager.observing.explainlive import page_now
from tests.sim.driver import Driver, sharded_group


@pytest.mark.parametrize(
    "text", ["", "p/hbm", ":", "p/hbm:", "p/hbm:x", "p/hbm:kv:1:2", "p/hbm:-1", f"p/hbm:{'9' * 5000}"]
)
def test_a_page_is_named_by_pool_and_number(text: str) -> None:
    node = Driver([sharded_group(4, 0)], Limits()).node
    with pytest.raises(InvalidArgument):
        page_now(node, text)
    assert page_now(node, "p/hbm:3")


@pytest.mark.parametrize("text", ["", "engine", "/1", "engine/", "engine/x", "engine/-1", f"engine/{'9' * 5000}"])
def test_a_request_is_named_by_engine_and_number(text: str) -> None:
    with pytest.raises(InvalidArgument):
        request_name(text)
    assert request_name("a/b/007") == "a/b/7"
