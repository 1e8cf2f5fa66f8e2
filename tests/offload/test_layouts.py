"""Stores of one layout, arenas of another: tp, pp, order, tokens per block, whole requests."""

import uuid
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.errors import RouteError, StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.disk.convert import convert
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.processes import shared_readers
from kvstow.offload.host.shared import remove
from kvstow.offload.host.tier import HostTier
from kvstow.offload.keys import block_keys, links, wanted
from kvstow.offload.mover.mover import Mover
from kvstow.offload.request import load_request
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, State, Window
from kvstow.plan.spec import Extent
from kvstow.route.blocks import Blocks
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
        layer("l.5", State(checkpoints=2), block_tokens=block_tokens),
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


def loaded(tiers, layout, num_tokens=TOKENS):
    """The prompt's blocks in a fresh arena of a layout, checked value by value."""
    arena = Arena(layout)
    arena.bytes.fill_(0xAB)
    keyed = wanted(IDENTITY, PROMPT, tiers[0].layout, num_tokens)
    blocks, start = {}, 1
    for g, rows in enumerate(layout.groups):
        group = rows.group
        if isinstance(group.retention, State):
            index = np.array([0])
        else:
            last = -(-num_tokens // group.block_tokens)
            seen = 0 if isinstance(group.retention, Full) else num_tokens - 8
            first = max(0, seen) // group.block_tokens
            index = np.arange(first, last)
        ids = np.arange(len(index)) + rows.rows_per_slab * start
        start += -(-len(index) // rows.rows_per_slab)
        blocks[g] = Blocks(ids, index)
    assert load_request(tiers, keyed, arena, blocks, num_tokens)
    for g, rows in enumerate(layout.groups):
        recurrent = isinstance(rows.group.retention, State)
        index = blocks[g].index
        first = [num_tokens] if recurrent else tokens_of(rows.group, index)
        if not recurrent and isinstance(rows.group.retention, Window):
            keep = [f >= num_tokens - 8 for f in first]
            check(arena, g, blocks[g].ids[keep], [f for f, k in zip(first, keep, strict=True) if k])
        else:
            check(arena, g, blocks[g].ids, first)


@pytest.mark.parametrize("order", ["LBHNC", "BLNHC", "BHLNC"])
def test_a_request_comes_into_another_order(tmp_path, order):
    tier = saved(tmp_path, layout_of())
    loaded([tier], layout_of(order=order))
    tier.close()


@pytest.mark.parametrize("block_tokens", [2, 8, 12])
def test_a_request_comes_into_other_block_sizes(tmp_path, block_tokens):
    tier = saved(tmp_path, layout_of())
    loaded([tier], layout_of(block_tokens=block_tokens))
    tier.close()


def test_two_ranks_stores_fill_one_arena_and_one_store_fills_two(tmp_path):
    halves = [saved(tmp_path / str(r), layout_of(tp=(r, 2))) for r in range(2)]
    loaded(halves, layout_of())
    loaded(halves, layout_of(block_tokens=8, order="BHLNC"))
    whole = saved(tmp_path / "whole", layout_of())
    for r in range(2):
        loaded([whole], layout_of(tp=(r, 2)))
    for tier in (*halves, whole):
        tier.close()


def shelved(name, layout):
    """A shared host tier with every block of the prompt, which its process has left."""
    arena = Arena(layout)
    host = HostTier(layout, capacity=MIB, shared=name)
    with closing(host), closing(Mover(arena, host)) as mover:
        for g, rows in enumerate(layout.groups):
            keys = block_keys(IDENTITY, PROMPT, rows.group.block_tokens)
            ids = np.arange(len(keys)) + rows.rows_per_slab * (1 + 4 * g)
            fill(arena, g, ids, tokens_of(rows.group, range(len(keys))))
            assert mover.store(g, ids, keys).result(20).all()


def test_shared_host_tiers_of_two_ranks_fill_one_arena_and_one_fills_two():
    for sources, targets in (([(0, 2), (1, 2)], [(0, 1)]), ([(0, 1)], [(0, 2), (1, 2)])):
        name = f"kvstow-test-{uuid.uuid4().hex[:12]}"
        try:
            for tp in sources:
                shelved(name, layout_of(tp=tp))
            parts = shared_readers(name)
            assert sorted(part.layout.tp for part in parts) == sources
            for tp in targets:
                loaded(parts, layout_of(tp=tp))
                loaded(parts, layout_of(tp=tp, order="LBHNC"))
            for part in parts:
                part.close()
        finally:
            assert remove(name) == len(sources)


def test_one_ranks_store_alone_is_refused_for_the_whole(tmp_path):
    tier = saved(tmp_path, layout_of(tp=(0, 2)))
    with pytest.raises(RouteError, match="no source holds"):
        loaded([tier], layout_of())
    tier.close()


def test_a_request_with_a_missing_row_is_a_miss_and_writes_nothing(tmp_path):
    tier = saved(tmp_path, layout_of())
    keyed = wanted(IDENTITY, PROMPT, tier.layout, TOKENS)
    tier.evict(0, keyed[0].keys[2:3])
    layout = layout_of(order="BLNHC")
    arena = Arena(layout)
    before = arena.bytes.numpy().copy()
    blocks = {g: Blocks.first([rows.rows_per_slab]) for g, rows in enumerate(layout.groups)}
    assert not load_request([tier], keyed, arena, blocks, TOKENS)
    assert (arena.bytes.numpy() == before).all()
    tier.close()


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
    arena = Arena(layout)
    new.close()
    with Store.open(tmp_path / "new", layout) as store:
        for g, rows in enumerate(layout.groups):
            keys = block_keys(IDENTITY, PROMPT, rows.group.block_tokens)
            ids = np.arange(len(keys)) + rows.rows_per_slab
            assert store.load_rows(arena, g, keys, ids).all()
            check(arena, g, ids, tokens_of(rows.group, range(len(keys))))
    old.close()


def test_two_ranks_stores_are_converted_into_one(tmp_path):
    halves = [saved(tmp_path / str(r), layout_of(tp=(r, 2))) for r in range(2)]
    new = DiskTier(tmp_path / "new", layout_of(), capacity=4 * MIB)
    halves[1].evict(0, block_keys(IDENTITY, PROMPT, 4)[1:2])
    done = convert(halves, new)
    assert done.incomplete == 1
    assert not new.contains(0, block_keys(IDENTITY, PROMPT, 4)[1:2]).any()
    loaded([new], layout_of(tp=(0, 2)), num_tokens=4)
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
    loaded([old], layout_of(block_tokens=2))  # what the hint says
    old.close()
    new.close()


def test_the_layout_in_a_store_is_what_the_fingerprint_says(tmp_path):
    layout = hybrid()
    tier = DiskTier(tmp_path, layout, capacity=MIB)
    assert tier.layout.groups[0].group == layout.groups[0].group
    assert replace(tier.layout, num_slabs=2) == tier.layout
    tier.close()
