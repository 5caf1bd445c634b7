"""Workspaces of ranks that gather layers: what the configuration makes of them, and what admission refuses for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvmanager.clients.glm.lent_workspace import WORKSPACE_FORMAT
from kvmanager.clients.glm.workspace import workspace_bytes
from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.groups import plan_memory
from kvmanager.configuration.reading import parse_config
from kvmanager.configuration.sizing import size_of
from kvmanager.core.eviction import leaf_first_lru
from kvmanager.core.spec import Limits, WorkspaceSpec
from kvmanager.errors import ConfigError, PoolExhausted
from kvmanager.geometry import ShardGeometry
from kvmanager.journal.journalcodec import configuration
from kvmanager.layout import GLM53_TINY, workspace_format
from tests.minimal_config import minimal_toml
from tests.sim.driver import Client, Driver, sharded_group

GEOMETRY = ShardGeometry(2, 16, 1)
PAGE = 16 * 788


def configured(bytes_per_rank: int, *, name: str = "g") -> NodeConfig:
    text = minimal_toml(Path("/tmp/none")).replace('name = "g"', f'name = "{name}"')
    return parse_config(text + f"workspace_bytes_per_rank = {bytes_per_rank}\n")


def test_each_rank_has_a_group_of_its_own() -> None:
    config = configured(5 * PAGE + 1)
    main, *workspaces = config.groups
    assert [group.name for group in workspaces] == [f"g-workspace-{rank}" for rank in range(main.ranks)]
    for group in workspaces:
        assert (group.kind, group.format, group.ranks, group.hbm_units) == ("engine", WORKSPACE_FORMAT.name, 1, 6)
        assert group.page_rows == main.page_rows
        assert group.host_bytes_per_rank == 0
    spec = plan_memory(config).groups[0]
    assert spec.workspace == WorkspaceSpec("g-workspace-0/hbm", 6, PAGE)
    assert plan_memory(configured(0)).groups[0].workspace is None
    assert workspace_format(GLM53_TINY) == WORKSPACE_FORMAT, "what clients lay out there"


def test_the_account_has_a_line_for_each_and_the_request_that_it_does_not_hold_is_refused() -> None:
    need = workspace_bytes(GEOMETRY, 90)
    sizing = size_of(configured(need), 90)
    lines = {line.pool: line for line in sizing.pools}
    assert lines["g-workspace-1/hbm"].page_total_bytes == -(-need // PAGE) * PAGE
    assert [line.workspace_bytes for line in sizing.beside] == [need]
    assert [(fit.group, fit.refusal) for fit in sizing.fits] == [("g", None)]
    refusal = size_of(configured(need), 130).fits[0].refusal
    assert isinstance(refusal, PoolExhausted)
    assert refusal.pool == "g-workspace-0/hbm"
    assert refusal.needed == -(-workspace_bytes(GEOMETRY, 130) // PAGE)
    assert refusal.free == -(-need // PAGE)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("interleave", [1, 2, 16])
def test_what_admission_lets_in_the_workspace_holds(ranks: int, interleave: int) -> None:
    """And one page less would not."""
    geometry = ShardGeometry(ranks, 16, interleave)
    for tokens in (1, 15, 16, 17, 31, 33, 127, 128, 129, 500):
        needed = WorkspaceSpec("w", 0, PAGE).pages_needed(geometry, tokens)
        assert (needed - 1) * PAGE < workspace_bytes(geometry, tokens) <= needed * PAGE


def test_a_refused_request_leaves_nothing_and_one_that_fits_gets_in() -> None:
    plain = sharded_group(10, 10, ranks=2, page_rows=16, kv_format=GLM53_TINY)
    spec = replace(plain, workspace=WorkspaceSpec("p-workspace-0/hbm", 6, PAGE))
    driver = Driver([spec])
    client = Client(driver, "p")
    assert client.serve(1, 48, "known").state == "runnable"
    before = {name: pool.account() for name, pool in driver.node.state.groups["p"].pools.items()}
    for number in (2, 3):
        opened = client.open(number, 49, "known")
        assert (opened.state, type(opened.error)) == ("refused", PoolExhausted)
        assert opened.error is not None
        assert (opened.error.pool, opened.error.needed, opened.error.free) == ("p-workspace-0/hbm", 7, 6)
        assert opened.error.retry_after_ns == 0, "waiting is of no use"
        assert "bytes" in str(opened.error)
    assert {name: pool.account() for name, pool in driver.node.state.groups["p"].pools.items()} == before
    assert driver.counters["refusal"] == 2
    assert not driver.node.state.groups["p"].claims, "nobody is held back for it"
    assert client.open(4, 48, "known").cached_tokens == 32
    client.close(4)
    client.run()
    driver.leave(client)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('kind = "sharded"', 'kind = "replicated"', "only ranks of a group of kind"),
        ("ranks = 2", "ranks = 1", "only ranks of a group of kind"),
        ("workspace_bytes_per_rank = 1", "workspace_bytes_per_rank = -1", "workspace_bytes_per_rank"),
    ],
)
def test_what_is_refused(old: str, new: str, words: str) -> None:
    text = minimal_toml(Path("/tmp/none")) + "workspace_bytes_per_rank = 1\n"
    assert old in text
    with pytest.raises(ConfigError, match=words):
        parse_config(text.replace(old, new).replace("interleave = 1\n", ""))


def test_a_name_that_a_workspace_takes_is_refused() -> None:
    taken = '\n[[group]]\nname = "g-workspace-1"\nkind = "engine"\nformat = "kv/uint8/1x1x788"\nranks = 1\n'
    text = minimal_toml(Path("/tmp/none")) + "workspace_bytes_per_rank = 1\n" + taken
    with pytest.raises(ConfigError, match="taken by a workspace of group 'g'"):
        parse_config(text + "page_rows = 16\nhbm_bytes_per_rank = 12608\n")


def test_a_journal_of_another_workspace_is_another_nodes() -> None:
    five, six = (configuration(plan_memory(configured(n * PAGE)).groups, Limits(), leaf_first_lru) for n in (5, 6))
    assert five != six
