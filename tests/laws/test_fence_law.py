"""Law 5: bytes are accepted only if every source block still was the ticket's afterwards.

A producer reuses random blocks at random moments of a pull: before it, between any two
copies, after the last byte but before the fence, after it. Whatever the moment, a pull
that is accepted has brought the offered bytes, in every group; and one during which
nothing was reused is accepted.
"""

from itertools import product
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from kvstow.blocks.pool import Pool
from kvstow.plan.manifest import encode
from kvstow.transfer.transport.local import Fabric, LocalTransport
from transfer_node import Node, from_json, hybrid_layout, rows_for

LAYOUT = hybrid_layout()
TOKENS = 18
SOURCE, TARGET = rows_for(LAYOUT, TOKENS, 1), rows_for(LAYOUT, TOKENS, 2)
BLOCKS = [(g, i) for g, blocks in from_json(SOURCE).items() for i in range(len(blocks))]


class Clumsy:
    """A producer that gives blocks to somebody else at the wrong moments."""

    def __init__(self, node: Node, moments: dict[int, list[tuple[int, int]]]) -> None:
        self.node = node
        self.moments = moments
        self.num_copies = 0
        self.reused: list[tuple[int, int]] = []

    def before_copy(self, _: int) -> None:
        for group, i in self.moments.get(self.num_copies, []):
            blocks = from_json(SOURCE)[group]
            one = {str(group): [[int(blocks.ids[i])], [int(blocks.index[i])]]}
            self.node.reuse(one, salt=99)
            self.reused.append((group, i))
        self.num_copies += 1


def pulled(moments: dict[int, list[tuple[int, int]]], direction: str) -> tuple[dict, Clumsy, str]:
    """How a pull ends, who reused what, and what is wrong with the bytes."""
    fabric, holder = Fabric(), []

    def hook(copy: int) -> None:
        if holder:
            holder[0].before_copy(copy)

    manifest = encode(LAYOUT)
    options = {"direction": direction, "heartbeat_seconds": 60.0}
    producer, consumer = (
        Node(
            manifest,
            name=name,
            options=options,
            transport=LocalTransport(fabric, step_bytes=1, before_copy=hook),
        )
        for name in ("producer", "consumer")
    )
    try:
        producer.fill(SOURCE)
        consumer.path(producer.address)
        ticket = producer.offer(SOURCE, TOKENS)
        clumsy = Clumsy(producer, moments)
        holder.append(clumsy)
        result = consumer.pull([ticket], TARGET, digest="off")
        return result, clumsy, consumer.check(TARGET, 0, TOKENS)
    finally:
        consumer.close()
        producer.close()


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(st.integers(0, 16), st.lists(st.sampled_from(BLOCKS), max_size=3), max_size=4),
    st.sampled_from(["read", "write", "slots"]),
    st.sampled_from([0, 1 << 16]),
)
def test_what_is_accepted_is_what_was_offered(moments, direction, long_gap):
    with mock.patch("kvstow.transfer.fence.LONG_GAP", long_gap):
        result, clumsy, wrong = pulled(moments, direction)
    if "error" not in result:
        assert wrong == ""
    else:
        assert result["kind"] == "fence"
        assert clumsy.reused
        assert set(result["blocks"]) == {rows.group.name for rows in LAYOUT.groups}


def test_a_pull_that_nobody_disturbs_is_accepted():
    for direction in ("read", "write", "slots"):
        result, clumsy, wrong = pulled({}, direction)
        assert "error" not in result
        assert wrong == ""
        assert clumsy.num_copies > 2


def test_every_single_block_reused_before_the_fence_is_noticed():
    """For each group and block, at the first copy: the error comes, and names the block."""
    for direction, (group, i) in product(("read", "slots"), BLOCKS):
        result, clumsy, _ = pulled({0: [(group, i)]}, direction)
        assert result["kind"] == "fence", (group, i)
        name = LAYOUT.groups[group].group.name
        block = from_json(SOURCE)[group].ids[i]
        assert f"group {name!r}: [{block}]" in result["error"]
        assert clumsy.reused == [(group, i)]


def test_reuse_after_the_fence_does_no_harm():
    _, clumsy, _ = pulled({}, "read")
    result, later, wrong = pulled({clumsy.num_copies: BLOCKS}, "read")
    assert "error" not in result
    assert wrong == ""
    assert later.reused == []


def test_a_pool_raises_the_generation_of_every_row_that_it_hands_out_again():
    """What the law rests on: before a new holder can write, the counter has moved."""
    pool = Pool(LAYOUT)
    for g in range(len(LAYOUT.groups)):
        rows = pool.hold(g, pool.num_free(g))
        ticket = pool.generations[g][rows].copy()
        pool.release(g, rows)
        for other in range(len(LAYOUT.groups)):
            again = pool.hold(other, pool.num_free(other))
            assert (pool.generations[g][rows] > ticket).all(), (g, other)
            pool.release(other, again)
