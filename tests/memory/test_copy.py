"""Copies inside one machine: byte-exact, nothing else touched, refused before anything moves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import BlockError, CopyError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import choose_method, copy
from kvstow.memory.cuda import GROWTH, OPENING, gather, rounds, shortened, word_bytes
from kvstow.memory.moves import Spans, merged, row_moves
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Alignment, Site, packed
from kvstow.route.copies import Copies
from kvstow.testing.patterns import fill, pattern
from planning import attention


def flat(num_slabs: int = 8, order: str = "BLHNC") -> Layout:
    layers = [attention(f"l.{i}", heads=2, dim=8, tokens=4) for i in range(2)]
    site = Site(order=order, alignment=Alignment(page=1, row=1, base=64))
    return packed(grouped(layers), num_slabs=num_slabs, site=site)


def spans(*moves: tuple[int, int, int]) -> Spans:
    return Spans(*np.array(moves, np.int64).reshape(-1, 3).T)


@st.composite
def scattered(draw: st.DrawFn, nbytes: int, *, step: int = 1) -> Spans:
    """Copies whose destinations are apart; sources may repeat."""
    cuts = draw(st.lists(st.integers(0, nbytes // step), max_size=12, unique=True))
    ends = [cut * step for cut in sorted(cuts)]
    places = [(lo, hi - lo) for lo, hi in zip(ends[::2], ends[1::2], strict=False)]
    moves = [
        (draw(st.integers(0, (nbytes - size) // step)) * step, place, size)
        for place, size in draw(st.permutations(places))
    ]
    return spans(*moves)


# ── bytes ─────────────────────────────────────────────────────────────────────────────


@given(st.data())
def test_every_move_arrives_and_nothing_else_changes(data):
    layout = flat()
    moves = data.draw(scattered(layout.nbytes))
    with Arena(layout) as a, Arena(layout) as b:
        fill(a, 1)
        fill(b, 2)
        expected = pattern(layout.nbytes, 2)
        for source, place, size in zip(*moves, strict=True):
            expected[place : place + size] = pattern(layout.nbytes, 1)[source : source + size]
        done = copy(a, b, moves)
        done.wait()
        assert done.poll()
        assert done.nbytes == int(moves.nbytes.sum())
        assert np.array_equal(b.bytes.numpy(), expected)
        assert np.array_equal(a.bytes.numpy(), pattern(layout.nbytes, 1))


def test_moves_of_a_route_are_taken_as_they_are():
    layout = flat()
    with Arena(layout) as a, Arena(layout) as b:
        fill(a, 1)
        moves = Copies(np.array([0, 64]), np.array([128, 0]), np.array([64, 64]))
        copy(a, b, moves).wait()
        assert torch.equal(b.bytes[128:192], a.bytes[:64])
        assert torch.equal(b.bytes[:64], a.bytes[64:128])


def test_a_copy_of_nothing_is_over_at_once():
    with Arena(flat()) as a, Arena(flat()) as b:
        done = copy(a, b, spans())
        assert done.poll()
        assert (done.num_moves, done.nbytes) == (0, 0)


def test_rows_move_inside_one_arena():
    layout = flat()
    with Arena(layout) as arena:
        fill(arena, 3)
        kept = arena.bytes.clone()
        copy(arena, arena, row_moves(layout, 0, [1, 2], [5, 7])).wait()
        stride = layout.row_stride(0)
        assert torch.equal(arena.bytes[5 * stride :][:stride], kept[stride : 2 * stride])
        assert torch.equal(arena.bytes[7 * stride :][:stride], kept[2 * stride : 3 * stride])


# ── as few as possible ────────────────────────────────────────────────────────────────


def test_neighbours_on_both_sides_are_one_move():
    layout = flat()
    row = layout.row_bytes(0)
    assert layout.row_stride(0) == row
    found = row_moves(layout, 0, [5, 1, 2, 3], [7, 4, 5, 2])
    assert [tuple(map(int, m)) for m in zip(*found, strict=True)] == [
        (row, 4 * row, 2 * row),
        (3 * row, 2 * row, row),
        (5 * row, 7 * row, row),
    ]


@given(st.data())
def test_merged_moves_carry_the_same_bytes(data):
    moves = data.draw(scattered(256))
    there = np.full(256, -1)
    for source, place, size in zip(*moves, strict=True):
        there[place : place + size] = np.arange(source, source + size)
    again = np.full(256, -1)
    along = data.draw(st.integers(0, 1))
    fewer = merged(moves, along=along)
    assert (np.diff(fewer[along]) >= 0).all()
    for source, place, size in zip(*fewer, strict=True):
        again[place : place + size] = np.arange(source, source + size)
    assert np.array_equal(there, again)
    assert len(fewer.source) <= len(moves.source)


@pytest.mark.parametrize("order", ORDERS)
def test_a_packed_block_is_one_move_and_a_layer_compact_one_is_several(order):
    layout = flat(order=order)
    found = row_moves(layout, 0, [5], [2])
    pieces = {"LBHNC": 2, "LBNHC": 2, "LHBNC": 4}
    assert len(found.source) == pieces.get(order, 1)


# ── refusals, before anything is copied ───────────────────────────────────────────────


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([(0, 0, 64), (1 << 40, 64, 1)], "source bytes"),
        ([(0, 0, 64), (-1, 64, 1)], "source bytes"),
        ([(0, 0, 64), (0, -8, 8)], "destination bytes"),
        ([(0, 0, 64), (64, 1 << 40, 8)], "destination bytes"),
        ([(0, 0, 64), (0, 64, 1 << 62)], "source bytes"),
        ([(0, 0, 64), (64, 63, 2)], "overlap"),
        ([(0, 0, 64), (64, 0, 64)], "overlap"),
        ([(0, 0, 64), (64, 64, -1)], "has -1 bytes"),
    ],
)
def test_moves_that_do_not_fit_are_refused_and_no_byte_is_copied(moves, message):
    with Arena(flat()) as a, Arena(flat()) as b:
        fill(a, 1)
        with pytest.raises(CopyError, match=message):
            copy(a, b, spans(*moves))
        assert not b.bytes.any()


def test_the_last_byte_is_inside_and_the_next_one_is_not():
    layout = flat()
    with Arena(layout) as a, Arena(layout) as b:
        copy(a, b, spans((layout.nbytes - 1, layout.nbytes - 1, 1))).wait()
        with pytest.raises(CopyError, match="source bytes"):
            copy(a, b, spans((layout.nbytes - 1, layout.nbytes - 2, 2)))


def test_a_copy_that_would_read_what_it_writes_is_refused():
    layout = flat()
    with Arena(layout) as arena:
        with pytest.raises(CopyError, match="which the same copy reads"):
            copy(arena, arena, row_moves(layout, 0, [1, 2], [2, 3]))
        with pytest.raises(CopyError, match="which the same copy reads"):
            copy(arena, arena, spans((0, 4, 8)))


@given(st.data())
def test_reading_what_is_written_is_found_by_counting_bytes(data):
    layout = flat(num_slabs=2)
    moves = data.draw(scattered(layout.nbytes))
    read = np.zeros(layout.nbytes, np.bool_)
    written = np.zeros(layout.nbytes, np.bool_)
    for source, place, size in zip(*moves, strict=True):
        read[source : source + size] = True
        written[place : place + size] = True
    with Arena(layout) as arena:
        if (read & written).any():
            with pytest.raises(CopyError):
                copy(arena, arena, moves)
        else:
            copy(arena, arena, moves).wait()


def test_arrays_of_different_lengths_or_kinds_are_refused():
    with Arena(flat()) as a, Arena(flat()) as b:
        for bad in (
            Spans(np.arange(2), np.arange(3), np.arange(2)),
            Spans(np.array([0.5]), np.array([0]), np.array([1])),
            Spans(
                np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64)
            ),
        ):
            with pytest.raises(CopyError, match="whole numbers of one length"):
                copy(a, b, bad)


def test_blocks_outside_the_layout_are_refused():
    layout = flat()
    with pytest.raises(BlockError, match="are not in"):
        row_moves(layout, 0, [8], [1])
    with pytest.raises(BlockError, match="are not in"):
        row_moves(layout, 0, [1], [-1])
    with pytest.raises(BlockError, match="2 source blocks, 1 destination"):
        row_moves(layout, 0, [1, 2], [1])


def test_a_method_that_needs_a_device_is_refused_between_host_arenas():
    layout = flat()
    with Arena(layout) as a, Arena(layout) as b:
        moves = row_moves(layout, 0, [1], [2])
        assert choose_method(a, b, 4096) == "memmove"
        for method in ("batch", "kernel", "plain"):
            with pytest.raises(CopyError, match="does not copy from cpu to cpu"):
                copy(a, b, moves, method=method)


# ── the gather kernel, in Triton's interpreter where there is no device ───────────────


@pytest.mark.parametrize("step", [1, 2, 4, 8, 16])
def test_the_gather_kernel_moves_the_same_bytes_at_every_word_length(step):
    rng = np.random.default_rng(step)
    source, destination = (
        torch.zeros(4096 + 64, dtype=torch.uint8),
        torch.zeros(4160, dtype=torch.uint8),
    )
    source = source[-source.data_ptr() % 64 :][:4096]
    destination = destination[-destination.data_ptr() % 64 :][:4096]
    source.copy_(torch.from_numpy(pattern(4096, 1)))
    destination.copy_(torch.from_numpy(pattern(4096, 2)))
    expected = destination.clone()
    places = np.sort(rng.permutation(4096 // step)[:8]) * step
    sizes = np.minimum(np.diff(np.append(places, 4096)), 40 * step)
    moves = Spans(rng.integers(0, (4096 - sizes.max()) // step, 8) * step, places, sizes)
    assert word_bytes(source.data_ptr(), destination.data_ptr(), moves) >= step
    for start, place, size in zip(*moves, strict=True):
        expected[place : place + size] = source[start : start + size]
    gather(source, destination, moves)
    assert torch.equal(destination, expected)


def test_the_gather_kernel_shares_long_moves_and_cuts_uneven_ones():
    source, destination = torch.zeros(1 << 19, dtype=torch.uint8), torch.zeros(1 << 19).byte()
    source.copy_(torch.from_numpy(pattern(1 << 19, 1)))
    lengths = [300_000, 64, 64, 64, 64, 70_000]
    moves = spans(*((100_000 - 64 * i, 1024 + sum(lengths[:i]) + 64 * i, length)
                    for i, length in enumerate(lengths)))  # fmt: skip
    expected = destination.clone()
    for start, place, size in zip(*moves, strict=True):
        expected[place : place + size] = source[start : start + size]
    gather(source, destination, moves)
    assert torch.equal(destination, expected)


@given(st.data())
def test_moves_that_are_cut_cover_the_same_bytes_and_are_no_longer_than_asked(data):
    moves = data.draw(scattered(512))
    size = data.draw(st.sampled_from([1, 16, 64, 1024]))
    pieces = shortened(moves, size)
    assert (pieces.nbytes <= size).all()
    assert (pieces.nbytes > 0).all()
    assert sorted(byte_pairs(pieces)) == sorted(byte_pairs(moves))


@given(st.integers(0, 5000))
def test_batches_are_all_of_the_moves_in_order_and_the_first_is_small(count):
    parts = list(rounds(count))
    assert [i for low, high in parts for i in range(low, high)] == list(range(count))
    assert all(low < high for low, high in parts)
    assert all(high - low <= OPENING * GROWTH**i for i, (low, high) in enumerate(parts))


def byte_pairs(moves: Spans) -> list[tuple[int, int]]:
    return [(s + i, d + i) for s, d, n in zip(*moves, strict=True) for i in range(n)]


@pytest.mark.parametrize(
    ("numbers", "word"),
    [((0, 0, 64), 16), ((16, 32, 48), 16), ((8, 0, 16), 8), ((4, 0, 16), 4), ((0, 0, 6), 2),
     ((0, 3, 16), 1)],
)  # fmt: skip
def test_a_word_divides_every_start_and_every_length(numbers, word):
    assert word_bytes(0, 4096, spans(numbers)) == word
