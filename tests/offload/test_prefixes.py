"""How much of a prompt can be loaded."""

from functools import partial

import numpy as np

from kvstow.blocks.prompt import Prompt
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.tier import HostTier
from kvstow.offload.keys import PromptRows, block_keys, links
from kvstow.offload.tier import Tier, held_by_any
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, State, Window
from offloading import IDENTITY, layer, random_rows

MIB = 1 << 20
TOKENS = 24
PROMPT = Prompt.of(np.arange(100, 100 + TOKENS), salt=b"tenant")


def stored(prompt: Prompt, tiers: list[Tier]) -> int:
    """How many of a prompt's tokens are found, all but the last one, which is computed anyway."""
    rows = PromptRows(tiers[0].layout, IDENTITY, prompt)
    return rows.longest(len(prompt) - 1, partial(held_by_any, tiers))


def three_kinds():
    """Three full, two window, one recurrent layer."""
    layers = [
        *(layer(f"l.{i}", Full()) for i in (0, 2, 4)),
        *(layer(f"l.{i}", Window(8)) for i in (1, 3)),
        layer("l.5", State()),
    ]
    layout = packed(grouped(layers), num_slabs=24, site=Site(model="m"))
    return layout.identified(IDENTITY)


def saved(path):
    """A store with every block of the prompt in every group."""
    tier = DiskTier(path, three_kinds(), capacity=4 * MIB)
    for g in range(len(tier.layout.groups)):
        keys = block_keys(IDENTITY, PROMPT, 4)
        rows = random_rows(tier.layout.row_bytes(g), len(keys), g)
        assert tier.store(g, keys, rows, links(keys)).all()
    return tier


def test_a_hit_is_the_longest_prefix_that_every_group_can_serve(tmp_path):
    tier = saved(tmp_path)
    assert stored(PROMPT, [tier]) == 20
    longer = PROMPT.extended([1, 2, 3])  # the last token is always computed
    assert stored(longer, [tier]) == 24
    keys = block_keys(IDENTITY, PROMPT, 4)
    kinds = [type(rows.group.retention) for rows in tier.layout.groups]
    tier.evict(kinds.index(Window), keys[:3])  # before the last window: not needed
    assert stored(longer, [tier]) == 24
    tier.evict(kinds.index(State), keys[5:])  # no checkpoint at 24
    assert stored(longer, [tier]) == 20
    tier.evict(kinds.index(Full), keys[1:2])  # 4 would need the window's first block
    assert stored(longer, [tier]) == 0
    tier.close()


def test_a_hit_may_be_pieced_together_from_several_tiers(tmp_path):
    tier = saved(tmp_path)
    host = HostTier(tier.layout, capacity=MIB)
    keys = block_keys(IDENTITY, PROMPT, 4)
    rows = [np.zeros(tier.layout.row_bytes(0), np.uint8) for _ in keys]
    tier.load(0, keys, rows)
    host.store(0, keys[2:4], rows[2:4])
    tier.evict(0, keys[2:4])
    longer = PROMPT.extended([1])
    assert stored(longer, [tier]) < 24
    assert stored(longer, [host, tier]) == 24
    tier.close()
