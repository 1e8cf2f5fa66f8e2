"""Blocks that somebody may still write to: kept until the last rank has let go of them."""

from collections.abc import Mapping
from random import Random
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import Hold, StepResults
from kvstow.adapters.vllm.scheduler import holds
from kvstow.adapters.vllm.scheduler.holds import HeldPulls, RowToStore, StoreQueue
from kvstow.adapters.vllm.scheduler.side import SchedulerSide
from pretended_engine import declaration
from recorded_vllm import Pool, engine_state


def of(rank: str, held: Mapping[int, tuple[int, ...]], released: tuple[int, ...] = ()):
    """What a rank tells."""
    return StepResults(
        held={(rank, pull): blocks for pull, blocks in held.items()},
        released=[(rank, pull) for pull in released],
    )


def side() -> tuple[SchedulerSide, Pool]:
    made, pool = SchedulerSide(engine_state(declaration("BLHNC"))), Pool()
    made.bind(pool)  # pyright: ignore
    return made, pool


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
    pulls: dict[Hold, set[int]], random: Random
):
    pool = Pool()
    engine = engine_state(declaration("BLHNC"), pool=pool)
    held, counts = HeldPulls(engine), engine.counts
    alive: dict[Hold, set[int]] = {}
    events = [*pulls, *pulls]
    random.shuffle(events)
    for hold in events:
        if hold in alive:
            del alive[hold]
            held.apply(StepResults(released=[hold]))
        else:
            alive[hold] = pulls[hold]
            held.apply(StepResults(held={hold: tuple(sorted(pulls[hold]))}))
        assert pool.held == set().union(*alive.values())
        assert held.num_blocks == len(pool.held)
        assert counts["held_blocks"] - counts["released_blocks"] == len(pool.held)
        assert len(held) == len(alive)
    assert pool.held == set()


# ── rows on their way to the tiers ────────────────────────────────────────────────────────


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def queue(**limits: int) -> tuple[StoreQueue, Pool, Clock]:
    clock, pool = Clock(), Pool()
    rate = limits.get("bytes_per_second", 0)
    engine = engine_state(
        declaration("BLHNC"),
        ConnectorOptions(host_bytes=1, store_bytes_per_second=rate),
        groups=[row_of(100), row_of(50)],
        num_blocks=limits.get("max_rows", 10) * (8 if rate else 2),
        num_ranks=limits.get("num_ranks", 1),
        pool=pool,
    )
    return StoreQueue(engine, clock=clock), pool, clock


def row_of(nbytes: int) -> Any:
    """A group with rows of so many bytes."""
    return SimpleNamespace(layers=[SimpleNamespace(page_bytes=nbytes)])


def row(block: int, group: int = 0) -> RowToStore:
    return RowToStore("r", group, b"key %d" % block, block)


def test_a_block_is_held_from_the_moment_it_is_queued_until_every_rank_has_stored_it():
    made, pool, _ = queue(num_ranks=2)
    made.add(row(3))
    made.add(row(4, group=1))
    assert pool.held == {3, 4}
    order = made.take()
    assert order is not None
    assert order.rows == {0: ((b"key 3",), (3,)), 1: ((b"key 4",), (4,))}
    made.stored(order.job, 1)
    assert pool.held == {3, 4}
    made.stored(order.job, 1)
    assert pool.held == set()
    assert len(made) == 0


def test_a_key_is_known_while_its_row_waits_and_while_it_is_stored():
    made, _, _ = queue()
    made.add(row(3))
    assert made.contains(0, b"key 3")
    assert not made.contains(1, b"key 3")
    order = made.take()
    assert order is not None
    assert made.contains(0, b"key 3")
    made.stored(order.job, 1)
    assert not made.contains(0, b"key 3")


def test_no_more_blocks_are_held_than_allowed():
    made, _, _ = queue(max_rows=2)
    made.add(row(1))
    assert not made.is_full
    made.add(row(2))
    assert made.is_full


def test_workers_are_given_more_when_they_have_told_of_earlier_rows(monkeypatch):
    monkeypatch.setattr(holds, "MAX_BYTES_UNDER_WAY", 250)
    made, _, _ = queue()
    for block in range(1, 6):
        made.add(row(block))
    first = made.take()
    assert first is not None
    assert first.rows[0][1] == (1, 2)
    assert made.take() is None
    made.stored(first.job, 1)
    second = made.take()
    assert second is not None
    assert second.rows[0][1] == (3, 4)


def test_a_row_larger_than_the_limit_goes_alone(monkeypatch):
    monkeypatch.setattr(holds, "MAX_BYTES_UNDER_WAY", 1)
    made, _, _ = queue()
    made.add(row(1))
    made.add(row(2))
    order = made.take()
    assert order is not None
    assert order.rows[0][1] == (1,)


def test_a_bandwidth_is_kept_and_no_more_than_a_second_is_saved_up():
    made, _, clock = queue(bytes_per_second=200)
    for block in range(1, 10):
        made.add(row(block))
    assert made.take() is None
    given = []
    for clock.now in (1.0, 1.1, 2.0, 10.0, 10.1):
        order = made.take()
        given.append(len(order.rows[0][0]) if order else 0)
    assert given == [2, 1, 1, 2, 1]
