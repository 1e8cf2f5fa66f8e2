"""Rows read whole and cut here end as the route's own copies do, byte by byte."""

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import strategies
from examples import examples
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.route import route
from kvstow.route.rows import row_reads
from kvstow.route.sources import sources

LARGEST_ARENA = 1 << 19
POISON = 0x5A

quick = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)


def triples(copies: Copies) -> list[tuple[int, int, int]]:
    columns = (copies.source, copies.destination, copies.nbytes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def run(copies: Copies, source: np.ndarray, destination: np.ndarray) -> None:
    for s, d, n in triples(copies):
        assert 0 <= s < s + n <= len(source)
        assert 0 <= d < d + n <= len(destination)
        destination[d : d + n] = source[s : s + n]


def run_through(rows, here: np.ndarray, there: np.ndarray, slot_bytes: int) -> np.ndarray:
    """Executes the pieces through a slot that is poisoned before each; which bytes were read."""
    read = np.zeros(len(here), np.bool_)
    for piece in rows.pieces(slot_bytes):
        assert len(piece.reads)
        assert len(piece.cuts)
        slot = np.full(slot_bytes, POISON, np.uint8)
        filled = np.zeros(slot_bytes, np.int64)
        for s, d, n in triples(piece.reads):
            read[s : s + n] = True
            filled[d : d + n] += 1
        assert filled.max() == 1
        run(piece.reads, here, slot)
        for s, _, n in triples(piece.cuts):
            assert (filled[s : s + n] == 1).all()
        run(piece.cuts, slot, there)
    return read


def check(a: Layout, ours: dict[int, Blocks], copies: Copies, there: np.ndarray, slot: int) -> None:
    """Both ways write the same bytes, and rows read nothing but their request's."""
    here = np.random.default_rng(1).integers(0, 256, a.nbytes, np.uint8)
    direct, through = there.copy(), there
    run(copies, here, direct)
    rows = row_reads(a, ours, copies)
    read = run_through(rows, here, through, slot)
    assert (through == direct).all()
    assert len(rows.reads) <= len(copies)
    assert len(rows.reads) <= sum(len(b) * len(a.footprints[g].strips) for g, b in ours.items())
    users = strategies.Users(a)
    mine = np.zeros(a.nbytes, np.bool_)
    for g, blocks in ours.items():
        mine |= users.own(g, blocks)
    assert not read[~mine].any()


def drawn_side(data: st.DataObject, model: object, num_tokens: int):
    how = data.draw(strategies.served(model, most_tokens=16))
    ranks = data.draw(st.integers(0, how.tp - 1)), data.draw(st.integers(0, how.pp - 1))
    layout = how.layout(model, *ranks, num_tokens)
    assume(layout.nbytes <= LARGEST_ARENA)
    return how, layout


@quick
@given(st.data())
def test_any_two_layouts_get_the_same_bytes_either_way(data: st.DataObject) -> None:
    model = data.draw(strategies.models())
    num_tokens = data.draw(st.integers(0, 32))
    (_, a), (_, b) = (drawn_side(data, model, num_tokens) for _ in range(2))
    ours, theirs = (data.draw(strategies.listed(x, num_tokens)) for x in (a, b))
    start = data.draw(st.integers(0, num_tokens))
    copies = route(a, b).copies(ours, theirs, num_tokens, start_token=start)
    there = np.random.default_rng(0).integers(0, 256, b.nbytes, np.uint8)
    check(a, ours, copies, there, data.draw(st.sampled_from([1, 7, 32, 64, 1000, 1 << 20])))


@quick
@given(st.data())
def test_several_sources_get_the_same_bytes_either_way(data: st.DataObject) -> None:
    model = data.draw(strategies.models())
    num_tokens = data.draw(st.integers(1, 24))
    (how, _), (_, b) = (drawn_side(data, model, num_tokens) for _ in range(2))
    peers = [how.layout(model, r, p, num_tokens) for p in range(how.pp) for r in range(how.tp)]
    assume(sum(peer.nbytes for peer in peers) <= LARGEST_ARENA)
    theirs = data.draw(strategies.listed(b, num_tokens))
    there = np.random.default_rng(0).integers(0, 256, b.nbytes, np.uint8)
    for source in sources(peers, b):
        a = peers[source.index]
        ours = data.draw(strategies.listed(a, num_tokens))
        copies = source.route.copies(ours, theirs, num_tokens)
        check(a, ours, copies, there, data.draw(st.sampled_from([5, 32, 4096])))


def llama(size: str = "70b", **how: int) -> Layout:
    site = Site(pp=(0, how.get("pp", 1)))
    layers = model_layers(f"llama-3.1-{size}", **how).layers
    return packed(grouped(layers), num_slabs=32, site=site)


def test_half_as_many_ranks_are_one_read_per_block_of_each_instead_of_80():
    eight, four = llama(tp=8), llama(tp=4)
    blocks = {0: Blocks.first([5, 9, 7])}
    copies = route(eight, four).copies(blocks, {0: Blocks.first([1, 8, 3])}, 48)
    rows = row_reads(eight, blocks, copies)
    assert (len(copies), len(rows.reads)) == (3 * 80, 3)
    assert rows.reads.total == 3 * eight.row_bytes(0) == copies.total


def test_blocks_of_four_times_the_tokens_are_four_reads_instead_of_1024():
    short, long = llama("8b", block_tokens=16), llama("8b", block_tokens=64)
    blocks = {0: Blocks.first([2, 4, 6, 8])}
    copies = route(short, long).copies(blocks, {0: Blocks.first([3])}, 64)
    rows = row_reads(short, blocks, copies)
    assert (len(copies), len(rows.reads)) == (1024, 4)
    assert rows.reads.total == copies.total


def test_a_row_is_read_from_the_first_byte_that_is_wanted_to_the_last():
    one, stage = llama(), llama(pp=2)
    blocks = {0: Blocks.first([2])}
    copies = route(one, stage).copies(blocks, {0: Blocks.first([3])}, 16)
    rows = row_reads(one, blocks, copies)
    assert len(rows.reads) == 1
    assert rows.reads.total == one.row_bytes(0) // 2


def test_neighbouring_rows_are_one_read_and_nothing_is_none():
    eight, four = llama(tp=8), llama(tp=4)
    blocks = {0: Blocks.first([5, 6, 4])}
    way = route(eight, four)
    rows = row_reads(eight, blocks, way.copies(blocks, {0: Blocks.first([1, 8, 3])}, 48))
    assert triples(rows.reads) == [(4 * eight.row_bytes(0), 0, 3 * eight.row_bytes(0))]
    assert row_reads(eight, blocks, Copies.none()).pieces(64) == []
