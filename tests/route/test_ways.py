"""Four ways between two layouts: counted like a request that is expanded, chosen by price."""

import numpy as np
import pytest

from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed
from kvstow.route.blocks import Blocks
from kvstow.route.copies import num_stretches
from kvstow.route.price import LINKS, MEMORIES, LinkSpeed
from kvstow.route.route import route
from kvstow.route.rows import row_reads
from kvstow.route.sources import sources
from kvstow.route.ways import (
    Amount,
    WayCounts,
    WayPrices,
    chosen,
    counted,
    fastest,
    gathers,
    prefers_rows,
)

TOKENS = 384


def layout(block_tokens: int, tp: int = 1, rank: int = 0) -> Layout:
    layers = model_layers("qwen3-0.6b", tp=tp, tp_rank=rank, block_tokens=block_tokens).layers
    return packed(grouped(layers), num_slabs=100, site=Site(tp=(rank, tp)))


def scattered(where: Layout, num_tokens: int) -> dict[int, Blocks]:
    count = num_tokens // where.groups[0].group.block_tokens
    return {0: Blocks.first(1 + 2 * np.random.default_rng(5).permutation(count))}


@pytest.mark.parametrize(
    ("here", "there"), [(16, 16), (16, 64), (64, 16), (16, 24), (24, 16), (1, 2), (2, 1)]
)
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2), (8, 4)])
def test_counts_are_those_of_a_request_whose_blocks_are_no_neighbours(here, there, tp):
    num_tokens = TOKENS if min(here, there) > 2 else 48
    target = layout(there, tp[1])
    for one in sources([layout(here, tp[0], rank) for rank in range(tp[0])], target):
        source = layout(here, tp[0], one.index)
        blocks = scattered(source, num_tokens)
        copies = one.route.copies(blocks, scattered(target, num_tokens), num_tokens)
        reads = row_reads(source, blocks, copies).reads
        found = counted(one.route, num_tokens)
        assert found.pieces == (len(copies), copies.total)
        assert found.rows == (len(reads), reads.total)
        assert found.num_stretches == num_stretches(copies)


def test_a_slot_is_filled_with_whole_pieces():
    found = counted(route(layout(16), layout(16)), 60 * 16)
    row = 28 * 2 * 8 * 16 * 128 * 2
    assert found.pieces.num == 60
    assert found.num_slots == -(-60 // ((32 << 20) // row))


def prices(link: str, memory: str) -> WayPrices:
    one = next(each for each in LINKS if each.name == link)
    other = next(each for each in MEMORIES if each.name == memory)
    return WayPrices.assumed(one, other, on_device=memory == "device")


def counts(num: int, nbytes: int, stretches: int, rows: int) -> WayCounts:
    """So many pieces of `nbytes` each, out of rows that hold nothing else."""
    total = num * nbytes
    return WayCounts(
        pieces=Amount(num, total), num_stretches=stretches, rows=Amount(rows, total), num_slots=1
    )


SHORT = counts(131072, 8 << 10, 128, 512)  # Llama-8B, 16 to 64 tokens
HEADS = counts(40960, 8 << 10, 40960, 512)  # Llama-70B, tp 8 to 4, one rank
EQUAL = counts(512, 2 << 20, 512, 512)


@pytest.mark.parametrize(
    ("link", "memory", "of", "way", "direction"),
    [
        ("ib400", "device", SHORT, "rows", "rows"),
        ("ib400", "device", HEADS, "rows", "rows"),
        ("ib400", "device", EQUAL, "direct", "read"),
        ("nvlink", "device", SHORT, "gathered", "write"),
        ("nvlink", "device", HEADS, "staged", "staged"),
        ("nvlink", "device", EQUAL, "direct", "write"),
        ("shm", "host", SHORT, "rows", "rows"),
        ("shm", "host", EQUAL, "direct", "read"),
        ("ib400", "host", SHORT, "direct", "read"),  # a read costs less than a copy by a processor
    ],
)
def test_the_way_depends_on_link_and_memory(link, memory, of, way, direction):
    choice = chosen(of, prices(link, memory), is_same_layout=of is EQUAL)
    assert (choice.way, choice.direction) == (way, direction)
    assert choice.why


def test_ways_that_host_memory_does_not_have_cost_nothing_that_could_be_said():
    on_host, on_device = prices("shm", "host"), prices("nvlink", "device")
    for way in ("gathered", "staged"):
        assert on_host.seconds(way, SHORT) is None
        assert on_device.seconds(way, SHORT) > 0


def test_the_chosen_way_is_the_quickest_or_nearly():
    """By the table's own prices no other way is twice as fast, which is what choosing allows."""
    for link in ("ib400", "nvlink", "shm", "tcp25"):
        for memory in ("device", "host"):
            for of in (SHORT, HEADS, EQUAL):
                cost = prices(link, memory)
                mine = cost.seconds(chosen(of, cost, is_same_layout=of is EQUAL).way, of)
                every = [cost.seconds(way, of) for way in ("direct", "rows", "gathered", "staged")]
                assert mine <= 2 * min(each for each in every if each is not None)


def test_a_path_that_is_neither_read_nor_written_is_staged():
    slow = LinkSpeed(name="slow", bytes_per_second=0.5e9, seconds_per_copy=0.0)
    memory = prices("shm", "device").cutting
    through = WayPrices(reading=slow, writing=slow, cutting=memory, staged_rate=3e9, on_device=True)
    choice = chosen(EQUAL, through, is_same_layout=True)
    assert (choice.way, choice.direction) == ("staged", "staged")
    assert choice.why.startswith("6.0×")


def test_layouts_that_are_equal_are_written_whatever_a_write_costs():
    tiny = counts(512, 64, 512, 512)
    cost = prices("nvlink", "device")
    assert chosen(tiny, cost, is_same_layout=False).way == "staged"
    assert chosen(tiny, cost, is_same_layout=True).way == "direct"


def test_the_simpler_way_is_taken_where_two_are_about_equal():
    assert fastest(5.0, 9.9, 0.0) == "read"
    assert fastest(5.0, 10.1, 20.0) == "write"
    assert fastest(5.0, 10.1, 20.3) == "staged"
    reading = LinkSpeed(name="link", bytes_per_second=1e9, seconds_per_copy=1e-6)
    for micros, is_preferred in ((0.78, True), (0.82, False)):
        cutting = LinkSpeed(name="here", bytes_per_second=1e18, seconds_per_copy=micros * 1e-6)
        assert prefers_rows(reading, cutting, Amount(10**6, 10), Amount(1, 10)) == is_preferred
    assert gathers(Amount(1257, 128 << 20), 1, on_device=True)
    assert not gathers(Amount(1000, 128 << 20), 1, on_device=True)
    assert not gathers(Amount(1257, 128 << 20), 1, on_device=False)
