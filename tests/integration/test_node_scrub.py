"""Pages between two tenants' real processes: what one is given holds no byte that the other wrote there before."""

from __future__ import annotations

from pathlib import Path

import pytest
from nodes_support import node
from other_user import needs_two_users
from scrub_support import OURS, THEIRS, one_after_the_other, scrub_config

pytestmark = needs_two_users


@pytest.mark.parametrize("scrub", [True, False])
def test_what_another_tenant_wrote_is_gone(tmp_path: Path, scrub: bool) -> None:
    """Without scrubbing each does see the other's bytes: so the test can fail."""
    with node(tmp_path, "prefill", scrub_config(scrub=scrub)) as running:
        theirs, ours = one_after_the_other(running)
        if scrub:
            assert theirs == {"opened": {0}, "grown": {0}}
            assert THEIRS not in ours
            assert running.counters()["scrubbed_page"] >= 6
        else:
            assert OURS in theirs["opened"] | theirs["grown"], "they were given pages of ours"
            assert THEIRS in ours
            assert running.counters()["scrubbed_page"] == 0
