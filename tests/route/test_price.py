"""What a request costs by the way that an agent takes."""

import pytest

from kvstow.plan.group import grouped
from kvstow.plan.pack import packed
from kvstow.route.price import LINKS, SLOTS_SHARE, Link, RequestPrice
from kvstow.route.route import plan_route
from kvstow.transfer.peers.probe import Path, Rates
from planning import attention

LINE = Link(name="line", bytes_per_second=1e9, seconds_per_copy=1e-6)
NODE = Link(name="node", bytes_per_second=1e9, seconds_per_copy=1e-6, is_one_node=True)


def test_a_network_takes_pieces_directly_or_through_slots_and_a_node_copies_them():
    assert LINE.ways(3, 700) == {"direct": pytest.approx(3.7e-6), "slots": pytest.approx(1e-6)}
    assert NODE.ways(3, 700) == {"mapped": pytest.approx(3.7e-6)}


def test_slots_are_taken_where_they_are_much_faster():
    assert [LINE.way(1, nbytes) for nbytes in (100, 100_000)] == ["slots", "direct"]
    assert {NODE.way(1, nbytes) for nbytes in (1, 100, 100_000)} == {"mapped"}


@pytest.mark.parametrize("link", [link for link in LINKS if not link.is_one_node], ids=str)
@pytest.mark.parametrize("nbytes", [512, 8 << 10, 1 << 20])
def test_an_agent_that_measures_what_the_table_says_takes_the_same_way(link, nbytes):
    def rate(length: int) -> float:
        return length / link.ways(1, length)["direct"]

    rates = Rates(long=rate(1 << 20), short=rate(min(nbytes, 8 << 10)))
    path = Path(read=rates, write=rates, slots=SLOTS_SHARE * link.bytes_per_second)
    expected = {"read": "direct", "slots": "slots"}[path.way_of(nbytes)]
    assert link.way(1000, 1000 * nbytes) == expected


def test_a_request_is_priced_block_by_block():
    here, there = (
        packed(grouped([attention("layers.0", tokens=tokens, heads=1)]), num_slabs=9)
        for tokens in (4, 6)
    )
    price = RequestPrice.of(plan_route(here, there), 24, NODE)
    assert (price.copies, price.nbytes, price.way) == (8, 4 * 48, "mapped")
    assert price.seconds == pytest.approx(8e-6 + 4 * 48e-9)
