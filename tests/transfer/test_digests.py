"""Samples: small, never empty, and no row whose content is another's goes unseen."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import combinations
from random import Random
from threading import Event
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvstow.memory.arena import Arena
from kvstow.memory.digest import (
    MODULUS,
    DigestCount,
    DigestOf,
    _on_device,
    _parts,
    counted_states,
    digest,
    prepared,
)
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full, State, Window
from kvstow.plan.spec import Extent
from kvstow.route.blocks import Blocks
from kvstow.transfer.digests import LEAST_SHARE, digests, in_worker, mismatches, warm_up
from kvstow.transfer.digests import samples as samples_with
from planning import attention
from strategies import Kind, group_bytes, listed, models, served, value

samples = partial(samples_with, random=Random(7))


def rows_of(num_layers: int, tokens: int = 4, num_slabs: int = 34, heads: int = 1) -> Layout:
    return packed(
        grouped(
            [attention(f"l.{i}", heads=heads, dim=4, tokens=tokens) for i in range(num_layers)]
        ),
        num_slabs=num_slabs,
    )


def two_layouts(data: st.DataObject, model: tuple[Kind, ...], num_tokens: int) -> list[Layout]:
    """One model served in two ways, each by one rank."""
    sides = [data.draw(served(model, tps=st.just(1), most_tokens=8)) for _ in range(2)]
    return [replace(side, pp=1).layout(model, 0, 0, num_tokens) for side in sides]


def picked(layout: Layout, sample, num_tokens: int) -> list[int]:
    """Numbers of the sampled states, one by one."""
    group, spec, _ = layout.layers[sample.layers[0]]
    low, high = counted_states(
        layout.groups[group].group, spec, sample.stop_token, sample.start_token
    )
    return [
        state
        for state in range(num_tokens)
        if low <= state < high and state % sample.every == sample.phase
    ]


@settings(max_examples=examples(60))
@given(st.data())
def test_a_sample_has_one_layer_of_every_group_and_is_never_empty(data):
    model = data.draw(models())
    num_tokens = data.draw(st.integers(1, 40))
    layouts = two_layouts(data, model, num_tokens)
    found = samples(layouts, 0, num_tokens, "sample")
    assert len(found) == len(layouts[0].groups)
    for sample, rows in zip(found, layouts[0].groups, strict=True):
        assert len(sample.layers) == 1
        first, end = sample.heads
        held = layouts[0].layers[sample.layers[0]][1].heads
        assert end == first + 1
        assert any(low <= first < high for low, high in held.pieces)
        assert sample.layers[0] in {layer.name for layer in rows.group.layers}
        counted = counted_states(rows.group, layouts[0].layers[sample.layers[0]][1], num_tokens, 0)
        if counted[0] < counted[1]:
            assert picked(layouts[0], sample, counted[1])


def test_a_sample_has_a_state_of_every_full_row_where_there_are_layers_enough():
    theirs, mine = rows_of(40, tokens=4), rows_of(40, tokens=8)
    for _ in range(20):
        (sample,) = samples((mine, theirs), 0, 64, "sample")
        assert sample.every == 4
        assert {state // 4 for state in picked(mine, sample, 64)} == set(range(16))


@given(st.integers(1, 200), st.integers(1, 9))
def test_a_sample_is_at_most_a_small_share_of_the_cells(num_layers, heads):
    (sample,) = samples((rows_of(num_layers, num_slabs=3, heads=heads),), 0, 8, "sample")
    assert sample.every * num_layers * heads >= LEAST_SHARE


def test_samples_of_heads_make_a_whole_on_any_ranks():
    """One head at a time, on ranks that hold several pieces of them, or one alike."""
    whole, *ranks = (
        [layer]
        for layer in (
            attention("l.0", heads=6, dim=4, tokens=4),
            *(
                replace(attention("l.0", heads=1, dim=4, tokens=4), heads=Extent("head", 6, pieces))
                for pieces in (((4, 6), (0, 1)), ((1, 3),), ((3, 4),))
            ),
        )
    )
    blocks = {0: Blocks.first(np.array([3, 1, 2]))}
    content = np.random.default_rng(5).integers(-9999, 9999, (3, 6, 4, 8)).astype(np.int16)
    found = []
    for layers in (whole, *ranks):
        layout = packed(grouped(layers), num_slabs=5)
        heads = np.concatenate([np.arange(*piece) for piece in layers[0].heads.pieces])
        with Arena(layout) as arena:
            cells = arena.tensor("l.0").view(torch.int16)
            cells[blocks[0].ids] = torch.as_tensor(content[:, heads])
            parts = [DigestOf(blocks, 11, heads=(h, h + 1)) for h in range(6)]
            few = list(prepared(arena, parts)())
            assert sum(few) % MODULUS == digest(arena, blocks, 11)
            assert prepared(arena, [DigestOf(blocks, 11, heads=(0, 6))])() == (sum(few) % MODULUS,)
            assert [h for h in range(6) if few[h]] == sorted(heads)
            found.append(few)
    assert [sum(column) for column in zip(*found[1:], strict=True)] == found[0]


def test_heads_are_counted_in_whatever_order_they_are_held():
    heads = Extent("head", 7, ((0, 1), (4, 6), (1, 2), (6, 7)))
    layer = replace(attention("l.0", heads=1, dim=4, tokens=4), heads=heads)
    blocks = {0: Blocks.first(np.array([3, 1, 2]))}
    with Arena(packed(grouped([layer]), num_slabs=5)) as arena:
        arena.bytes.random_(0, 256)
        each = prepared(arena, [DigestOf(blocks, 11, heads=(h, h + 1)) for h in range(7)])()
        for low, high in combinations(range(8), 2):
            some = prepared(arena, [DigestOf(blocks, 11, heads=(low, high))])
            assert some() == (sum(each[low:high]) % MODULUS,)


def test_any_two_rows_that_were_exchanged_are_seen_in_a_sample():
    layout = rows_of(32)
    rng = np.random.default_rng(3)
    with Arena(layout) as theirs, Arena(layout) as mine:
        theirs.bytes.random_(0, 256)
        mine.bytes.copy_(theirs.bytes)
        right = Blocks.first(rng.permutation(np.arange(1, 33)))
        for _ in range(40):
            wanted = samples((layout, layout), 0, 128, "sample")
            there = digests(theirs, {0: right}, wanted, None)
            assert mismatches(wanted, digests(mine, {0: right}, wanted, None), [there]) == []
            one, other = rng.choice(32, 2, replace=False)
            ids = right.ids.copy()
            ids[[one, other]] = ids[[other, one]]
            here = digests(mine, {0: Blocks.first(ids)}, wanted, None)
            assert len(mismatches(wanted, here, [there])) == 1


@settings(max_examples=examples(40))
@given(st.data())
def test_two_sides_find_the_same_sample_whatever_their_layouts(data):
    model = data.draw(models())
    num_tokens = data.draw(st.integers(1, 20))
    layouts = two_layouts(data, model, num_tokens)
    wanted = samples(layouts, 0, num_tokens, "sample")
    found = []
    for layout in layouts:
        blocks = data.draw(listed(layout, num_tokens))
        with Arena(layout) as arena:
            arena.bytes.random_(0, 256)
            for group, held in blocks.items():
                there = group_bytes(layout, group, held)
                arena.bytes.numpy()[there.address] = value(there.layer, there.number)
            found.append(digests(arena, blocks, wanted, None))
    assert mismatches(wanted, found[0], found[1:]) == []


def test_every_kind_of_retention_is_sampled_where_it_still_holds_something():
    layers = [
        attention("full", retention=Full()),
        attention("window", retention=Window(6)),
    ]
    layout = packed(grouped(layers), num_slabs=40)
    assert not any(isinstance(rows.group.retention, State) for rows in layout.groups)
    for _ in range(30):
        for sample in samples((layout,), 0, 61, "sample"):
            assert picked(layout, sample, 61)


def test_policies_that_are_not_samples_compare_everything_or_nothing():
    layout = rows_of(3)
    assert samples((layout,), 4, 9, "off") == ()
    (whole,) = samples((layout,), 4, 9, "always")
    assert (whole.layers, whole.start_token, whole.stop_token) == (("l.0", "l.1", "l.2"), 4, 9)
    assert (whole.every, whole.phase) == (1, 0)


def test_a_digest_made_ready_counts_what_lies_there_when_it_is_taken():
    layout = rows_of(4)
    blocks = {0: Blocks.first(np.array([3, 1, 2]))}
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        for which in ({}, {"heads": (0, 1), "layers": ["l.2"], "every": 4, "phase": 1}):
            take = prepared(arena, [DigestOf(blocks, 11, **which)])
            before = take()
            assert before == take() == prepared(arena, [DigestOf(blocks, 11, **which)])()
            arena.bytes.random_(0, 256)
            assert before != take() == prepared(arena, [DigestOf(blocks, 11, **which)])()


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_a_device_takes_all_samples_in_one_launch_and_finds_the_hosts_numbers(data):
    # the kernel runs in Triton's interpreter here, on an arena in host memory
    num_tokens = data.draw(st.integers(1, 40))
    layout = two_layouts(data, data.draw(models()), num_tokens)[0]
    blocks = data.draw(listed(layout, num_tokens))
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        wanted = [
            DigestOf(
                blocks, num_tokens, layers=x.layers, heads=x.heads, every=x.every, phase=x.phase
            )
            for x in samples([layout], 0, num_tokens, "sample")
        ]
        parts = [_parts(arena, each) for each in wanted]
        take = DigestCount(_on_device(arena, parts))
        assert take() == prepared(arena, wanted)()
        arena.bytes.random_(0, 256)
        assert take() == prepared(arena, wanted)()


@settings(max_examples=examples(30))
@given(st.data())
def test_any_arena_can_be_warmed_up_and_keeps_its_bytes(data):
    layout = two_layouts(data, data.draw(models()), 8)[0]
    arena = Arena(layout)
    arena.bytes.random_(0, 256)
    before = arena.bytes.clone()
    warm_up(arena)
    assert torch.equal(arena.bytes, before)


def test_mapped_memory_is_held_until_the_worker_has_counted_whoever_still_waits():
    holds, go = [1], Event()
    mapped = SimpleNamespace(
        hold=lambda: holds.append(holds[-1] + 1), release=lambda: holds.append(holds[-1] - 1)
    )
    worker = ThreadPoolExecutor(1)
    endpoint = SimpleNamespace(worker=worker, wake=lambda: None)
    counting = in_worker(endpoint, lambda: (int(go.wait(10)),), mapped)
    next(counting)
    counting.close()  # the pull has ended, by its deadline or because the agent closes
    assert holds == [1, 2]
    go.set()
    worker.shutdown()
    assert holds == [1, 2, 1]
