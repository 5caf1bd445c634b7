"""Trust domains: groups that one tenant's engines map are not mapped, nor their timelines raised, by another's."""

from __future__ import annotations

import pytest

from kvmanager.configuration.groups import TIMELINE_REGION, plan_memory
from kvmanager.configuration.reading import parse_config
from kvmanager.daemon.memory import NodeRegions
from kvmanager.errors import ConfigError
from kvmanager.services.worker_service import WorkerService, _layouts
from tests.minimal_config import minimal_toml

GROUP = (
    '[[group]]\nname = "{name}"\nkind = "sharded"\nformat = "glm-5.3-tiny-fp8_ds_mla"\nranks = 2\npage_rows = 16\n'
    'hbm_bytes_per_rank = "1MiB"\nhost_bytes_per_rank = "1MiB"\ntrust = "{trust}"\n'
)
TENANT = '[[tenant]]\nname = "{name}"\nuids = [{uid}]\n{more}\n'
VAULT = TENANT.format(name="v", uid=7, more='trust = "vault"')
ATTIC = TENANT.format(name="a", uid=8, more='trust = "attic"')
TWO = minimal_toml() + GROUP.format(name="v", trust="vault") + GROUP.format(name="a", trust="attic") + VAULT + ATTIC


def test_tenants_have_their_domain() -> None:
    config = parse_config(TWO)
    assert [config.trust_of(uid) for uid in (7, 8, 9)] == ["vault", "attic", ""]
    assert [group.trust for group in config.groups] == ["", "vault", "attic"]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (GROUP.format(name="v", trust="vault"), r"\[\[group\]\] 'v' trust: no \[\[tenant\]\] has trust = 'vault'"),
        (VAULT, r"\[\[tenant\]\] 'v' trust: no \[\[group\]\] has trust = 'vault'"),
        (GROUP.format(name="v", trust=""), "trust: '' is not a non-empty string"),
    ],
)
def test_domains_that_nobody_could_use(toml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(minimal_toml() + toml)


def test_a_region_that_engines_map_is_of_one_domain() -> None:
    hisparse = (
        '[[group]]\nname = "{name}"\nkind = "hisparse"\nformat = "glm-5.3-tiny-fp8_ds_mla"\nranks = 1\npage_rows = 16\n'
        'hbm_bytes_per_rank = "8MiB"\nhost_bytes_per_rank = "32MiB"\ntoken_order = "sequential"\nsource_ranks = 2\n'
        'source_interleave = 1\nhot_rows = 32\nhost_region = "ram"\nhost_extent_bytes = "4MiB"\n{trust}'
    )
    shared = [hisparse.format(name="d", trust=""), hisparse.format(name="e", trust='trust = "vault"\n')]
    with pytest.raises(ConfigError, match=r"'d' trust: its host_region 'ram' is shared with e of another"):
        parse_config(minimal_toml() + "".join(shared) + VAULT)
    # Host memory of sharded groups is mapped by movers alone.
    region = 'host_region = "ram"\nhost_extent_bytes = "512KiB"\n'
    sharded = [GROUP.format(name=name, trust="vault") + region for name in ("x", "y")]
    sharded[1] = sharded[1].replace('"vault"', '"attic"')
    text = minimal_toml() + "".join(sharded) + VAULT + ATTIC
    assert len(parse_config(text).groups) == 3


def test_engines_of_two_domains_share_no_region() -> None:
    """Not even the timelines: who raises another's word has pages published, or freed, while they are written."""
    plan = plan_memory(parse_config(TWO))
    assert plan.timelines[""] == TIMELINE_REGION
    service = object.__new__(WorkerService)
    service._regions = NodeRegions(plan, None)
    try:
        granted = [
            {*service._granted(spec, _layouts(spec, rank))} for spec in plan.groups for rank in range(spec.ranks)
        ]
        domains = [spec.trust for spec in plan.groups for _ in range(spec.ranks)]
        for mine, regions in zip(domains, granted, strict=True):
            for other, theirs in zip(domains, granted, strict=True):
                assert mine == other or not regions & theirs
        assert plan_memory(parse_config(minimal_toml())).timelines == {"": TIMELINE_REGION}
        assert {plan.region(region).kind.name for region in plan.timelines.values()} == {"TIMELINE"}
    finally:
        service._regions.close()


def test_words_lie_in_their_domains_region() -> None:
    plan = plan_memory(parse_config(TWO))
    regions = NodeRegions(plan, None)
    try:
        words = {trust: [regions.new_word(trust) for _ in range(3)] for trust in plan.timelines}
        every = [word for each in words.values() for word in each]
        assert len({*every}) == len(every)
        for trust, mine in words.items():
            assert [regions.place_of(word) for word in mine] == [0, 1, 2], trust
        for attach_id, word in enumerate(every):
            regions.bind(attach_id, word, ())
            array, place = regions._word(word)
            array[place] = 100 + attach_id
        assert regions.read() == {attach_id: 100 + attach_id for attach_id in range(len(every))}
        last = words["vault"][-1]
        assert regions.unbind(every.index(last)) == 100 + every.index(last)
        regions.free_words([every.index(last)])
        assert regions.new_word("attic") != last, "a word that another domain's engines could raise"
        assert regions.new_word("vault") == last
        # A later daemon knows how many words were used, not by whom.
        later = NodeRegions(plan, None, {r.region_id: regions.fd(r.region_id) for r in plan.regions}, max(every) + 1)
        assert not {later.new_word(trust) for trust in plan.timelines} & {*every}
        later._fds.clear()
    finally:
        regions.close()
