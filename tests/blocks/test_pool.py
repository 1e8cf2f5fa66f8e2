"""What a pool promises beyond sets of ids: runs, gaps, who loses a slab, what it says."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from block_layouts import HYBRID, RECURRENT, cache, layer, packed_layout, rows_per_slab
from kvstow.blocks.placement import RowDemand
from kvstow.blocks.pool import Pool
from kvstow.errors import BlockError, OutOfBlocks, WrongThread
from kvstow.plan.sizing.plan import plan_model


def test_a_pool_of_a_plan_has_the_blocks_of_its_layout() -> None:
    plan = plan_model("gemma-3-270m", num_slabs=9)
    assert Pool(plan).layout is plan.layout


def test_generations_move_to_memory_that_others_read_and_go_on_there() -> None:
    layout = packed_layout(HYBRID, 4)
    pool = Pool(layout)
    first = pool.hold(0, 2)
    memory = [np.full(layout.num_blocks(g), 7, np.int64) for g in range(len(layout.groups))]
    pool.place_generations(memory)
    ids = pool.hold(0, 2)
    assert memory[0][first].tolist() == memory[0][ids].tolist() == [1, 1]
    assert pool.generations[0] is memory[0]


def test_nobody_can_give_back_the_hold_of_the_quarantine() -> None:
    pool = Pool(packed_layout((layer("a"),), 3))
    ids = pool.hold(0, 2)
    pool.quarantine(0, ids[:1])
    pool.release(0, ids)
    with pytest.raises(BlockError, match=f"block {ids[0]} is released more often than it is held"):
        pool.release(0, ids[:1])
    assert pool.quarantined(0).tolist() == ids[:1].tolist()
    pool.check()


def test_a_quarantine_begins_and_ends_with_another_generation() -> None:
    pool = Pool(packed_layout((layer("a"),), 4))
    ids = pool.hold(0, 2)
    seen = [pool.generations[0][ids].copy()]
    for change in (pool.quarantine, pool.unquarantine):
        change(0, ids)
        assert (pool.generations[0][ids] > seen[-1]).all()
        seen.append(pool.generations[0][ids].copy())


def test_a_row_is_quarantined_once_and_freed_of_it_once() -> None:
    pool = Pool(packed_layout((layer("a"),), 3))
    ids = pool.hold(0, 2)
    lost: list[int] = []
    pool.on_evict.append(lambda group, ids: lost.extend(ids.tolist()))
    pool.keep(0, ids)
    pool.quarantine(0, ids[:1])
    assert lost == ids[:1].tolist()
    with pytest.raises(BlockError, match=f"block {ids[0]} is in quarantine already"):
        pool.quarantine(0, ids)
    with pytest.raises(BlockError, match=f"block {ids[1]} is not in quarantine"):
        pool.unquarantine(0, ids)
    assert pool.quarantined(0).tolist() == ids[:1].tolist()
    pool.check()


def in_thread(call, name: str = "other") -> BaseException | None:
    """What a call in another thread raises."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return raised[0]


def changes(pool: Pool, ids: np.ndarray) -> dict[str, Callable[[], object]]:
    return {
        "hold": lambda: pool.hold(0, 1),
        "hold_all": lambda: pool.hold_all([RowDemand(0, 1)]),
        "share": lambda: pool.share(0, ids),
        "release": lambda: pool.release(0, ids),
        "keep": lambda: pool.keep(0, ids),
        "forget": lambda: pool.forget(0, ids),
        "quarantine": lambda: pool.quarantine(0, ids),
        "unquarantine": lambda: pool.unquarantine(0, ids),
    }


@pytest.mark.parametrize("change", sorted(changes(None, None)))
def test_a_change_in_another_thread_than_the_owners_is_refused(change: str) -> None:
    pool = Pool(packed_layout((layer("a"),), 6))
    ids = pool.hold(0, 2)
    holds, generations = pool.holds(0, ids).tolist(), pool.generations[0].tolist()
    error = in_thread(changes(pool, ids)[change])
    assert isinstance(error, WrongThread)
    assert "'other'" in str(error)
    assert "'MainThread'" in str(error)
    assert "hint: " in str(error)
    assert "hand_over()" in str(error)
    assert pool.holds(0, ids).tolist() == holds
    assert pool.generations[0].tolist() == generations
    pool.check()


def test_a_pool_that_is_handed_over_belongs_to_the_next_thread_that_changes_it() -> None:
    pool = Pool(packed_layout((layer("a"),), 6))
    pool.hold(0, 1)
    pool.hand_over()
    assert in_thread(lambda: pool.hold(0, 1)) is None
    with pytest.raises(WrongThread, match="thread"):
        pool.hold(0, 1)
    pool.hand_over()
    pool.hold(0, 1)
    assert pool.num_held(0) == 3


def test_what_is_refused_says_what_is_needed_and_free_in_every_group() -> None:
    pool = Pool(packed_layout(RECURRENT, 3))
    words = (
        "'full': 9 needed, 18 free; of group 'state': 12 needed, 16 free; "
        "1 slabs too few for all of them together"
    )
    with pytest.raises(OutOfBlocks, match=words) as caught:
        pool.hold_all([RowDemand(0, 9), RowDemand(1, 12)])
    assert caught.value.needed == 21


def test_only_slabs_with_held_rows_strand_their_free_ones() -> None:
    pool = Pool(packed_layout(RECURRENT, 6))
    size = rows_per_slab(pool, 0)
    cache(pool, 0, size)
    assert pool.num_stranded(0) == 0
    pool.hold(0, 1)
    assert pool.num_stranded(0) == size - 1


def test_cached_rows_beside_a_held_one_are_not_stranded() -> None:
    pool = Pool(packed_layout(RECURRENT, 6))
    size = rows_per_slab(pool, 0)
    ids = pool.hold(0, 3)
    pool.keep(0, ids)
    pool.release(0, ids)
    pool.share(0, ids[:1])
    assert pool.num_cached(0) == 2
    assert pool.num_stranded(0) == size - 3


def test_check_names_the_numbers_that_do_not_add_up() -> None:
    pool = Pool(packed_layout(HYBRID, 6))
    ids = pool.hold(0, 4)
    pool.check()
    pool._of[0][1].refs[ids[0]] = 0
    with pytest.raises(BlockError, match="held rows: 3 counted, 4 in the books"):
        pool.check()


def test_rows_of_a_group_that_is_not_there_cannot_be_held() -> None:
    pool = Pool(packed_layout(HYBRID, 2))
    for group in (-1, len(pool.layout.groups)):
        with pytest.raises(BlockError, match=f"group {group} is not one of"):
            pool.hold(group, 1)
    for change in (pool.keep, pool.share):
        with pytest.raises(BlockError, match="held"):
            change(0, [1])
    with pytest.raises(BlockError, match="-1 rows cannot be held"):
        pool.hold(0, -1)
