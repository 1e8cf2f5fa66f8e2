"""What a request costs by the way that an agent takes."""

import pytest

from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from kvstow.route.price import LINKS, Link, RequestPrice
from kvstow.route.route import plan_route
from kvstow.route.ways import Path, Rates
from planning import attention

LINE = Link(name="line", bytes_per_second=1e9, seconds_per_copy=1e-6)
SLOW = Link(name="slow", bytes_per_second=1e9, seconds_per_copy=20e-6)
NODE = Link(name="node", bytes_per_second=1e9, seconds_per_copy=1e-6, is_one_node=True)


def test_a_network_takes_pieces_directly_or_through_slots_and_a_node_copies_them():
    assert LINE.ways(3, 700) == {"direct": pytest.approx(3.7e-6), "slots": pytest.approx(1e-6)}
    assert NODE.ways(3, 700) == {"mapped": pytest.approx(3.7e-6)}


def test_slots_are_taken_where_they_are_much_faster():
    assert [SLOW.way(nbytes) for nbytes in (100, 100_000)] == ["slots", "direct"]
    assert {NODE.way(nbytes) for nbytes in (1, 100, 100_000)} == {"mapped"}


LENGTHS = [1 << power for power in range(9, 23)]
LENGTHS += [3 << power for power in range(8, 21)] + [(32 << 10) - 1]


@pytest.mark.parametrize("link", [link for link in LINKS if not link.is_one_node], ids=str)
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_an_agent_that_measures_what_the_table_says_takes_the_same_way(link, nbytes):
    """It measures 4 MiB in one piece and in pieces of 8 KiB; slots are 0.7 of the long rate."""

    def rate(length: int) -> float:
        return length / (link.seconds_per_copy + length / link.bytes_per_second)

    long, short = rate(4 << 20), rate(8 << 10)
    path = Path(read=Rates(long, short), slots=0.7 * long)
    assert link.way(nbytes) == {"read": "direct", "slots": "slots"}[path.way_of(nbytes)]
    assert link.path.read == pytest.approx((long, short))


def test_pieces_of_half_a_long_one_take_the_way_of_short_ones():
    """16 KiB at ib400: by its own length, direct copies would be preferred."""
    (ib400,) = (link for link in LINKS if link.name == "ib400")
    assert (ib400.way(16 << 10), ib400.way(32 << 10)) == ("slots", "direct")


def test_a_pull_between_equal_layouts_is_direct_whatever_the_length_of_its_pieces():
    layers = [attention(f"layers.{i}") for i in range(3)]
    here, there = (
        packed(grouped(layers), num_slabs=9, site=Site(model="m", order=order))
        for order in ("LBHNC", "BLHNC")
    )
    ways = [RequestPrice.of(plan_route(here, to), 24, SLOW).way for to in (here, there)]
    assert ways == ["direct", "slots"]


def test_a_request_is_priced_block_by_block():
    here, there = (
        packed(grouped([attention("layers.0", tokens=tokens, heads=1)]), num_slabs=9)
        for tokens in (4, 6)
    )
    price = RequestPrice.of(plan_route(here, there), 24, NODE)
    assert (price.copies, price.nbytes, price.way) == (8, 4 * 48, "mapped")
    assert price.seconds == pytest.approx(8e-6 + 4 * 48e-9)
