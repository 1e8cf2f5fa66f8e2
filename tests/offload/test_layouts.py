"""Stores of one layout, arenas of another: tp, pp, order, tokens per block."""

from dataclasses import replace

import numpy as np
import pytest

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.disk.convert import convert
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.keys import block_keys, links
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, State, Window
from kvstow.plan.spec import Extent
from offloading import IDENTITY, hybrid, layer

MIB = 1 << 20
TOKENS = 24


def layout_of(tp=(0, 1), *, order="BLHNC", block_tokens=4, num_slabs=24):
    """Three full, two window, one recurrent layer; heads split over tp ranks."""
    rank, size = tp
    heads = Extent("head", 4, ((4 // size * rank, 4 // size * (rank + 1)),))
    layers = [
        *(layer(f"l.{i}", Full(), block_tokens=block_tokens, heads=heads) for i in (0, 2, 4)),
        *(layer(f"l.{i}", Window(8), block_tokens=block_tokens, heads=heads) for i in (1, 3)),
        layer("l.5", State(), block_tokens=block_tokens),
    ]
    site = Site(model="m", order=order, tp=tp)
    return packed(grouped(layers), num_slabs=num_slabs, site=site).identified(IDENTITY)


def value(name, field, head, token, content):
    """What a cell holds; by content, so that a misplaced one shows."""
    which = int(name.split(".")[1]) * 2 + (field == "v")
    return np.float16((which * 13 + head * 7 + token * 3 + content) % 2039)


def fill(arena, group, ids, first_token):
    """Write a request's blocks: block `ids[i]` holds tokens from `first_token[i]` on."""
    for spec in arena.layout.groups[group].group.layers:
        heads = [h for lo, hi in spec.heads.pieces for h in range(lo, hi)]
        for field in ("k", "v"):
            view = arena.field(spec.name, field).numpy()
            for block, first in zip(ids, first_token, strict=True):
                for h, head in enumerate(heads):
                    for t in range(spec.states):
                        for c in range(8):
                            view[block, h, t, c] = value(spec.name, field, head, first + t, c)


def check(arena, group, ids, first_token):
    expected = Arena(arena.layout)
    fill(expected, group, ids, first_token)
    for spec in arena.layout.groups[group].group.layers:
        for field in ("k", "v"):
            got = arena.field(spec.name, field).numpy()[ids]
            assert (got == expected.field(spec.name, field).numpy()[ids]).all()


def tokens_of(group, index):
    """First token of each block; a summary stands for the end of its block."""
    if isinstance(group.retention, State):
        return [(int(i) + 1) * group.block_tokens for i in index]
    return [int(i) * group.block_tokens for i in index]


PROMPT = Prompt.of(np.arange(100, 100 + TOKENS), salt=b"tenant")


def saved(path, layout):
    """A store with every block of the prompt in every group; its arena is forgotten."""
    arena = Arena(layout)
    with Store.open(path, layout, capacity=4 * MIB) as store:
        for g, rows in enumerate(layout.groups):
            keys = block_keys(IDENTITY, PROMPT, rows.group.block_tokens)
            ids = np.arange(len(keys)) + rows.rows_per_slab * (1 + 4 * g)
            fill(arena, g, ids, tokens_of(rows.group, range(len(keys))))
            assert store.save_rows(arena, g, ids, keys, links(keys)).all()
    return DiskTier(path)


def check_store(path, layout):
    """Every row of the prompt comes out of a store into an arena of a layout, value by value."""
    arena = Arena(layout)
    with Store.open(path, layout) as store:
        for g, rows in enumerate(layout.groups):
            keys = block_keys(IDENTITY, PROMPT, rows.group.block_tokens)
            ids = np.arange(len(keys)) + rows.rows_per_slab
            assert store.load_rows(arena, g, keys, ids).all()
            check(arena, g, ids, tokens_of(rows.group, range(len(keys))))


@pytest.mark.parametrize("order", ["LBHNC", "BLNHC", "BHLNC"])
def test_rows_come_into_another_order(tmp_path, order):
    saved(tmp_path, layout_of()).close()
    check_store(tmp_path, layout_of(order=order))


# ── conversion ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "target",
    [{"order": "BHLNC"}, {"order": "LBNHC"}, {"block_tokens": 8}, {"block_tokens": 12}],
    ids=str,
)
def test_a_converted_store_serves_arenas_of_the_new_layout_directly(tmp_path, target):
    old = saved(tmp_path / "old", layout_of())
    layout = layout_of(**target)
    new = DiskTier(tmp_path / "new", layout, capacity=4 * MIB)
    done = convert([old], new)
    assert done.incomplete == 0
    assert done.written == new.usage.rows
    new.close()
    check_store(tmp_path / "new", layout)
    old.close()


def test_two_ranks_stores_are_converted_into_one(tmp_path):
    halves = [saved(tmp_path / str(r), layout_of(tp=(r, 2))) for r in range(2)]
    new = DiskTier(tmp_path / "new", layout_of(), capacity=4 * MIB)
    assert convert(halves, new).incomplete == 0
    new.close()
    check_store(tmp_path / "new", layout_of())
    lost = block_keys(IDENTITY, PROMPT, 4)[1:2]
    halves[1].evict(0, lost)
    new = DiskTier(tmp_path / "newer", layout_of(), capacity=4 * MIB)
    assert convert(halves, new).incomplete == 1
    assert not new.contains(0, lost).any()
    for tier in (*halves, new):
        tier.close()


def test_a_conversion_counts_rows_that_are_in_no_block_of_the_new_size(tmp_path):
    old = saved(tmp_path / "old", layout_of())
    groups, rows = len(old.layout.groups), old.usage.rows
    lost = block_keys(IDENTITY, PROMPT, 4)[2:3]
    full = next(g for g, r in enumerate(old.layout.groups) if r.group.retention == Full())
    old.evict(full, lost)  # its neighbour, the fourth block, is of no use in a block of eight
    strange = [b"no place", b"nor this one"]
    nothing = [np.zeros(old.layout.row_bytes(full), np.uint8) for _ in strange]
    assert old.store(full, strange, nothing).all()
    same = DiskTier(tmp_path / "same", layout_of(order="BHLNC"), capacity=4 * MIB)
    larger = DiskTier(tmp_path / "larger", layout_of(block_tokens=8), capacity=4 * MIB)
    done = convert([old], same)
    assert (done.written, done.incomplete, done.left_out) == (rows + 1, 0, 0)
    done = convert([old], larger)
    assert groups == 3
    assert done.incomplete == 0
    states = 3  # of six, where no block of eight ends
    assert done.left_out == 1 + len(strange) + states
    assert not larger.contains(full, strange).any()
    for tier in (old, same, larger):
        tier.close()


def test_conversion_keeps_chains_so_that_it_can_be_repeated(tmp_path):
    old = saved(tmp_path / "4", layout_of())
    mid = DiskTier(tmp_path / "8", layout_of(block_tokens=8), capacity=4 * MIB)
    end = DiskTier(tmp_path / "24", layout_of(block_tokens=24), capacity=4 * MIB)
    convert([old], mid)
    convert([mid], end)
    assert end.contains(0, block_keys(IDENTITY, PROMPT, 24)).all()
    for tier in (old, mid, end):
        tier.close()


@pytest.mark.parametrize("host", [None, "1MiB"])
def test_a_store_with_host_memory_can_be_converted_to_larger_blocks(tmp_path, host):
    layout = layout_of()
    arena, ledger = Arena(layout), Ledger(Pool(layout))
    with Store(host=host, disk=tmp_path / "old", disk_bytes=4 * MIB) as store:
        blocks = ledger.blocks(ledger.admit(len(PROMPT)).request)
        store.save(arena, blocks, PROMPT)
        assert store.flush(20)
    old = DiskTier(tmp_path / "old")
    new = DiskTier(tmp_path / "new", layout_of(block_tokens=8), capacity=4 * MIB)
    convert([old], new)
    full = next(g for g, r in enumerate(new.layout.groups) if r.group.retention == Full())
    assert new.contains(full, block_keys(IDENTITY, PROMPT, 8)).all()
    old.close()
    new.close()


def test_smaller_blocks_cannot_be_converted_to(tmp_path):
    old = saved(tmp_path / "old", layout_of())
    new = DiskTier(tmp_path / "new", layout_of(block_tokens=2), capacity=4 * MIB)
    with pytest.raises(
        StoreError, match=r"keys, not the tokens .*\n\nhint: choose a multiple of 4"
    ):
        convert([old], new)
    assert new.usage.rows == 0
    old.close()
    new.close()


def test_the_layout_in_a_store_is_what_the_fingerprint_says(tmp_path):
    layout = hybrid()
    tier = DiskTier(tmp_path, layout, capacity=MIB)
    assert tier.layout.groups[0].group == layout.groups[0].group
    assert replace(tier.layout, num_slabs=2) == tier.layout
    tier.close()
