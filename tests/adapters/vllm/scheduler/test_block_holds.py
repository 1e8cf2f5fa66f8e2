"""Blocks that somebody may still write to: kept until the last rank has let go of them."""

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.adapters.vllm.counts import EngineCounts
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import Hold, RanksReport
from kvstow.adapters.vllm.scheduler.block_holds import HeldPulls
from kvstow.adapters.vllm.scheduler.side import SchedulerSide
from pretended_engine import NUM_BLOCKS, declaration, declared_groups
from recorded_vllm import IDENTITY, Pool


def of(rank: str, held: Mapping[int, tuple[int, ...]], released: tuple[int, ...] = ()):
    """What a rank tells."""
    return RanksReport(
        held={(rank, pull): blocks for pull, blocks in held.items()},
        released=tuple((rank, pull) for pull in released),
    )


def side() -> tuple[SchedulerSide, Pool]:
    made = SchedulerSide(
        declared_groups(declaration("BLHNC")), NUM_BLOCKS, ConnectorOptions(), identity=IDENTITY
    )
    pool = Pool()
    made.held.pool = pool
    return made, pool


def test_a_block_is_held_until_every_rank_that_held_it_has_let_go():
    made, pool = side()
    made.apply(of("r0", {1: (3, 4)}).joined(of("r1", {1: (4, 5)})))
    assert pool.held == {3, 4, 5}
    made.apply(of("r0", {}, (1,)))
    assert pool.held == {4, 5}
    made.apply(of("r1", {}, (1,)))
    assert pool.held == set()
    assert made.counts == {"held blocks": 3, "released blocks": 3}


def test_a_rank_that_lets_go_in_the_very_report_that_tells_of_it_leaves_nothing_behind():
    made, pool = side()
    made.apply(of("r0", {1: (3,)}, (1,)).joined(of("r1", {}, ())))
    assert pool.held == set()
    assert len(made.held) == 0


def test_a_hold_is_given_back_once():
    made, _ = side()
    made.apply(of("r0", {1: (3,)}))
    with pytest.raises(AssertionError, match="held already"):
        made.apply(of("r0", {1: (3,)}))
    made.apply(of("r0", {}, (1,)))
    with pytest.raises(KeyError):
        made.apply(of("r0", {}, (1,)))


def test_a_report_of_held_blocks_alone_is_told():
    assert of("r0", {1: (3,)})
    assert of("r0", {}, (1,))
    assert not of("r0", {})


HOLDS = st.dictionaries(
    st.tuples(st.sampled_from(["r0", "r1"]), st.integers(1, 4)),
    st.sets(st.integers(1, 9), min_size=1, max_size=4),
    max_size=8,
)


@given(HOLDS, st.randoms(use_true_random=False))
def test_in_any_order_every_hold_is_given_back_and_no_block_before_its_last(
    holds: dict[Hold, set[int]], random: Random
):
    counts, pool = EngineCounts(), Pool()
    held = HeldPulls(counts)
    held.pool = pool
    alive: dict[Hold, set[int]] = {}
    events = [*holds, *holds]
    random.shuffle(events)
    for hold in events:
        if hold in alive:
            del alive[hold]
            held.apply(RanksReport(released=(hold,)))
        else:
            alive[hold] = holds[hold]
            held.apply(RanksReport(held={hold: tuple(sorted(holds[hold]))}))
        assert pool.held == set().union(*alive.values())
        assert held.num_blocks == len(pool.held)
        assert counts["held blocks"] - counts["released blocks"] == len(pool.held)
        assert len(held) == len(alive)
    assert pool.held == set()
