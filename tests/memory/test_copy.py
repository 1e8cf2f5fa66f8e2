"""Copies inside one machine: byte-exact, nothing else touched, refused before anything copies."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import BlockError, CopyError, SpecError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import _copy_on_host, block_copies, choose_method, copy, copy_grids
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Alignment, Site, packed
from kvstow.plan.retention import Window
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.route import plan_route
from patterns import fill, pattern
from planning import attention


def flat(num_slabs: int = 8, order: str = "BLHNC") -> Layout:
    layers = [attention(f"l.{i}", heads=2, dim=8, tokens=4) for i in range(2)]
    site = Site(order=order, alignment=Alignment(page=1, row=1, base=64))
    return packed(grouped(layers), num_slabs=num_slabs, site=site)


def copies_of(*triples: tuple[int, int, int]) -> Copies:
    return Copies(*np.array(triples, np.int64).reshape(-1, 3).T)


def triples(copies: Copies) -> list[tuple[int, int, int]]:
    columns = copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist()
    return list(zip(*columns, strict=True))


@st.composite
def scattered(draw: st.DrawFn, nbytes: int, *, step: int = 1) -> Copies:
    """Copies whose destinations are apart; sources may repeat."""
    cuts = draw(st.lists(st.integers(0, nbytes // step), max_size=12, unique=True))
    ends = [cut * step for cut in sorted(cuts)]
    places = [(lo, hi - lo) for lo, hi in zip(ends[::2], ends[1::2], strict=False)]
    copies = [
        (draw(st.integers(0, (nbytes - size) // step)) * step, place, size)
        for place, size in draw(st.permutations(places))
    ]
    return copies_of(*copies)


# ── bytes ─────────────────────────────────────────────────────────────────────────────


@given(st.data())
def test_every_copy_arrives_and_nothing_else_changes(data):
    layout = flat()
    copies = data.draw(scattered(layout.nbytes))
    with Arena(layout) as a, Arena(layout) as b:
        fill(a, 1)
        fill(b, 2)
        expected = pattern(layout.nbytes, 2)
        for source, place, size in triples(copies):
            expected[place : place + size] = pattern(layout.nbytes, 1)[source : source + size]
        done = copy(a, b, copies)
        done.wait()
        assert done.poll()
        assert done.nbytes == int(copies.nbytes.sum())
        assert np.array_equal(b.bytes.numpy(), expected)
        assert np.array_equal(a.bytes.numpy(), pattern(layout.nbytes, 1))


def test_a_copy_of_nothing_is_over_at_once():
    with Arena(flat()) as a, Arena(flat()) as b:
        done = copy(a, b, copies_of())
        assert done.poll()
        assert (done.num_copies, done.nbytes) == (0, 0)


# ── whole blocks ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_go_into_an_arena_with_more_blocks_of_the_same_rows(order):
    few, many = flat(num_slabs=4, order=order), flat(num_slabs=9, order=order)
    with Arena(few) as a, Arena(many) as b:
        fill(a, 1)
        b.bytes.fill_(0xA5)
        copy(a, b, blocks=[3, 1], into=[8, 5]).wait()
        for name in few.layers:
            here, there = a.tensor(name).view(torch.int16), b.tensor(name).view(torch.int16)
            assert torch.equal(here[[3, 1]], there[[8, 5]])
            assert (there[[0, 1, 2, 3, 4, 6, 7]] == -23131).all()  # 0xA5A5


@pytest.mark.parametrize("group", ["window4", 1])
def test_blocks_of_one_of_several_groups_are_copied_by_its_name_or_number(group):
    layers = [attention("a", dim=8), attention("b", dim=8, retention=Window(4))]
    layout = packed(grouped(layers), num_slabs=6)
    with Arena(layout) as a, Arena(layout) as b:
        fill(a, 1)
        copy(a, b, blocks=[2], into=[4], group=group).wait()
        assert torch.equal(a.tensor("b")[2].view(torch.int16), b.tensor("b")[4].view(torch.int16))
        with pytest.raises(
            BlockError,
            match=r"2 groups.*'full', 'window4'.*\n\nhint: name the group, such as 'full'",
        ):
            copy(a, b, blocks=[2], into=[4])
        with pytest.raises(
            BlockError, match=r"no group 2: the layout has 2, \['full', 'window4'\]"
        ):
            copy(a, b, blocks=[2], into=[4], group=2)
        with pytest.raises(SpecError, match="no group 'sink'"):
            copy(a, b, blocks=[2], into=[4], group="sink")


@pytest.mark.parametrize(
    "other",
    [
        flat(order="BLNHC"),
        packed(grouped([attention("l.0", heads=2, dim=8, tokens=4)]), num_slabs=8),
        packed(
            grouped([attention(f"l.{i}", heads=2, dim=8, tokens=2) for i in range(2)]), num_slabs=8
        ),
    ],
    ids=["order", "layers", "tokens"],
)
def test_blocks_are_not_copied_between_rows_that_differ(other):
    with Arena(flat()) as a, Arena(other) as b:
        fill(a, 1)
        for source, destination in ((a, b), (b, a)):
            with pytest.raises(
                CopyError, match=r"rows of the two arenas differ.*\n\nhint: .*route"
            ):
                copy(source, destination, blocks=[1], into=[2])
        assert not b.bytes.any()


def test_a_copy_is_told_what_to_copy_in_one_way():
    with Arena(flat()) as a, Arena(flat()) as b:
        for wrong in ({}, {"blocks": [1]}, {"into": [1]}):
            with pytest.raises(CopyError, match="either `copies`, or `blocks` and `into`"):
                copy(a, b, **wrong)
        with pytest.raises(CopyError, match="and not both"):
            copy(a, b, copies_of((0, 0, 1)), blocks=[1], into=[1])
        with pytest.raises(
            BlockError, match=r"a list of whole numbers, not float64 of shape \(1,\)"
        ):
            copy(a, b, blocks=[1.5], into=[1])
        copy(a, b, blocks=[], into=[]).wait()


# ── as few as possible ────────────────────────────────────────────────────────────────


def test_neighbours_on_both_sides_are_one_copy():
    layout = flat()
    row = layout.row_bytes(0)
    assert layout.row_stride(0) == row
    found = block_copies(layout, 0, [5, 1, 2, 3], [7, 4, 5, 2])
    assert triples(found) == [
        (row, 4 * row, 2 * row),
        (3 * row, 2 * row, row),
        (5 * row, 7 * row, row),
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_a_packed_block_is_one_copy_and_a_layer_compact_one_is_several(order):
    layout = flat(order=order)
    found = block_copies(layout, 0, [5], [2])
    pieces = {"LBHNC": 2, "LBNHC": 2, "LHBNC": 4}
    assert len(found.source) == pieces.get(order, 1)


# ── refusals, before anything is copied ───────────────────────────────────────────────


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([(0, 0, 64), (1 << 40, 64, 1)], "source bytes"),
        ([(0, 0, 64), (-1, 64, 1)], "source bytes"),
        ([(0, 0, 64), (0, -8, 8)], "destination bytes"),
        ([(0, 0, 64), (64, 1 << 40, 8)], "destination bytes"),
        ([(0, 0, 64), (0, 64, 1 << 62)], "source bytes"),
        ([(0, 0, 64), (64, 63, 2)], "overlap"),
        ([(0, 0, 64), (64, 0, 64)], "overlap"),
        ([(0, 0, 64), (64, 64, -1)], "source bytes"),
        ([(0, 0, 64), (64, 64, 0)], "source bytes"),
    ],
)
def test_copies_that_do_not_fit_are_refused_and_no_byte_is_copied(copies, message):
    with Arena(flat()) as a, Arena(flat()) as b:
        fill(a, 1)
        with pytest.raises(CopyError, match=message):
            copy(a, b, copies_of(*copies))
        assert not b.bytes.any()


def test_a_copy_that_would_read_what_it_writes_is_refused():
    layout = flat()
    with Arena(layout) as arena:
        with pytest.raises(CopyError, match="of the same copy reads"):
            copy(arena, arena, block_copies(layout, 0, [1, 2], [2, 3]))
        with pytest.raises(CopyError, match="of the same copy reads"):
            copy(arena, arena, copies_of((0, 4, 8)))


@given(st.data())
def test_reading_what_is_written_is_found_by_counting_bytes(data):
    layout = flat(num_slabs=2)
    copies = data.draw(scattered(layout.nbytes))
    read = np.zeros(layout.nbytes, np.bool_)
    written = np.zeros(layout.nbytes, np.bool_)
    for source, place, size in triples(copies):
        read[source : source + size] = True
        written[place : place + size] = True
    with Arena(layout) as arena:
        if (read & written).any():
            with pytest.raises(CopyError):
                copy(arena, arena, copies)
        else:
            copy(arena, arena, copies).wait()


def test_blocks_outside_the_layout_are_refused():
    layout = flat()
    with pytest.raises(BlockError, match="are not in"):
        block_copies(layout, 0, [8], [1])
    with pytest.raises(BlockError, match="are not in"):
        block_copies(layout, 0, [1], [-1])
    with pytest.raises(BlockError, match="2 source blocks, 1 destination"):
        block_copies(layout, 0, [1, 2], [1])


def test_a_method_that_needs_a_device_is_refused_between_host_arenas():
    layout = flat()
    with Arena(layout) as a, Arena(layout) as b:
        copies = block_copies(layout, 0, [1], [2])
        assert choose_method(a, b, 4096) == "memmove"
        for method in ("batch", "kernel", "plain"):
            with pytest.raises(CopyError, match="does not copy from cpu to cpu"):
                copy(a, b, copies, method=method)


@pytest.mark.parametrize("unit", [1, 8, 16, 17, 48, 64, 4096, 8192, 16384])
@pytest.mark.parametrize("longest", [1, 2, 9])
@pytest.mark.parametrize("shift", [0, 5])
def test_short_copies_inside_host_memory_are_exact_at_every_length(unit, longest, shift):
    rng = np.random.default_rng(unit * longest)
    count, room = 300, 800 * longest * unit + 2 * shift
    memory = pattern(room, 1), pattern(room, 2)
    expected = memory[1].copy()
    places = np.sort(rng.permutation(799 * longest)[:count])
    units = np.minimum(np.diff(np.append(places, places[-1] + longest)), longest)
    starts = rng.integers(0, 799 * longest, count)
    copies = Copies(starts * unit + shift, places * unit + shift, units * unit)
    for start, place, size in triples(copies):
        expected[place : place + size] = memory[0][start : start + size]
    order = rng.permutation(count)
    _copy_on_host(copies.take(order).moved(*(each.ctypes.data for each in memory)))
    assert (memory[1] == expected).all()


def test_grids_that_leave_an_arena_are_refused_before_a_device_is_asked():
    layout = packed(grouped([attention("l.0", heads=2, dim=8, tokens=4)]), num_slabs=8)
    here, there = Arena(layout), Arena(layout)
    one = {0: Blocks.first([1])}
    (grid,) = plan_route(layout, layout).grids(one, one, 4)
    for wrong in (replace(grid, source=np.array([8])), replace(grid, destination=np.array([-1]))):
        with pytest.raises(CopyError, match="inside the arena"):
            copy_grids(here, there, [wrong])
