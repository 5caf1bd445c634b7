"""Workspaces of PCP x DCP ranks: a group of kind "engine" for each rank of a group that asks for them.

    [[group]]
    name = "prefill"
    kind = "sharded"
    ranks = 8
    workspace_bytes_per_rank = "2 GiB"

has the groups "prefill-workspace-0" to "prefill-workspace-7" beside it: pool lines of their own in the node's account,
which who computes on that rank holds as a whole. A request whose steps need more of it is refused when it is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvmanager.configuration.groupsection import GroupSection
from kvmanager.core.spec import WorkspaceSpec
from kvmanager.errors import ConfigError
from kvmanager.layout import workspace_format, workspace_group


def with_workspaces(groups: Sequence[GroupSection]) -> tuple[GroupSection, ...]:
    """The groups, and behind them the workspaces that they ask for. Raises ConfigError for a name that is taken."""
    made: list[GroupSection] = []
    for group in groups:
        for rank in range(group.ranks if group.workspace_bytes_per_rank else 0):
            name = workspace_group(group.name, rank)
            if any(other.name == name for other in groups):
                raise ConfigError(f"[[group]] {name!r}: the name is taken by a workspace of group {group.name!r}")
            made.append(replace(
                group, name=name, kind="engine", format=workspace_format(group.kv_format).name, ranks=1, interleave=1,
                hbm_bytes_per_rank=_pages(group) * _page_bytes(group), host_bytes_per_rank=0, host_region="",
                host_floor=0.0, host_ceiling=1.0, host_extent_bytes=0, scrub=False, workspace_bytes_per_rank=0,
                workspace_for=group.name,
            ))  # fmt: skip
    return (*groups, *made)


def workspace_of(group: GroupSection) -> WorkspaceSpec | None:
    """What the core knows of it."""
    if not group.workspace_bytes_per_rank:
        return None
    return WorkspaceSpec(f"{workspace_group(group.name, 0)}/hbm", _pages(group), _page_bytes(group))


def _page_bytes(group: GroupSection) -> int:
    return workspace_format(group.kv_format).page_bytes(group.page_rows)


def _pages(group: GroupSection) -> int:
    """Whole pages, rounded up: what was reckoned for some length must hold it."""
    return -(-group.workspace_bytes_per_rank // _page_bytes(group))
