"""Rows on their way to the tiers: held, in turn, within limits."""

from kvstow.adapters.vllm.scheduler import store_queue
from kvstow.adapters.vllm.scheduler.store_queue import RowToStore, StoreQueue
from recorded_vllm import Pool


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def queue(**limits: int) -> tuple[StoreQueue, Pool, Clock]:
    clock, pool = Clock(), Pool()
    made = StoreQueue([100, 50], max_rows=limits.pop("max_rows", 10), clock=clock, **limits)
    made.holds = pool
    return made, pool, clock


def row(block: int, group: int = 0) -> RowToStore:
    return RowToStore("r", group, b"key %d" % block, block)


def test_a_block_is_held_from_the_moment_it_is_queued_until_every_rank_has_stored_it():
    made, pool, _ = queue()
    made.num_ranks = 2
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


def test_no_more_blocks_are_held_than_allowed_and_none_without_a_pool():
    made, _, _ = queue(max_rows=2)
    made.add(row(1))
    assert not made.is_full
    made.add(row(2))
    assert made.is_full
    assert StoreQueue([1], max_rows=5).is_full


def test_workers_are_given_more_when_they_have_told_of_earlier_rows(monkeypatch):
    monkeypatch.setattr(store_queue, "MAX_BYTES_UNDER_WAY", 250)
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
    monkeypatch.setattr(store_queue, "MAX_BYTES_UNDER_WAY", 1)
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
