"""At the end the daemon and its mover agree on what is under way: nothing, whatever happened in between."""

from __future__ import annotations

from pathlib import Path

from nodes_support import node, prefill_toml, rotate, wait_for

from kvmanager.daemon.moverlink import mover_socket
from tests.integration.mover_process import Client

NEWER_BOOT = 1 << 62
"""A boot id above any daemon's: the mover takes us for its next one, and tells what it still carries."""


def test_every_plan_that_was_sent_has_ended_on_both_sides(tmp_path: Path) -> None:
    with node(tmp_path, "prefill", prefill_toml) as served:
        rotate(served, [1, 2, 3, 4])
        # What gave way to a refused request is written later: in the end all spans of all prompts have a host copy.
        wait_for(lambda: served.counters()["offload"] >= 20, lambda: str(served.counters()))
        assert served.counters()["onboard"] > 0
        wait_for(lambda: served.admin.status().movers[0].outstanding == 0)
        assert not any(sum(states[1:3]) for states in served.pools().values()), "no page is reserved or being filled"
        mover = Client(mover_socket(served.runtime_dir, "cpu"), boot_id=NEWER_BOOT)
        try:
            assert mover.outstanding == []
            told = {completion.plan_id for completion in mover.redelivered}
            assert len(told) == len(mover.redelivered) > 0, "once each"
        finally:
            mover.close()
