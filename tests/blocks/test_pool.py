"""What a pool promises beyond sets of ids: runs, gaps, who loses a slab, what it says."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from block_layouts import (
    HYBRID,
    MIXED,
    RECURRENT,
    all_rows,
    cache,
    layer,
    packed_layout,
    rows_per_slab,
)
from kvstow.blocks.placement import RowDemand
from kvstow.blocks.pool import Pool
from kvstow.errors import BlockError, OutOfBlocks, WrongThread
from kvstow.plan.sizing.plan import plan_model


def test_a_pool_of_a_plan_is_refused_with_what_to_do() -> None:
    with pytest.raises(BlockError, match=r"not Plan\n\nhint: .*plan\.layout"):
        Pool(plan_model("gemma-3-270m"))  # pyright: ignore[reportArgumentType]


def test_null_rows_are_never_handed_out() -> None:
    for layers in (HYBRID, RECURRENT, MIXED):
        pool = Pool(packed_layout(layers, 4))
        for group in range(len(pool.layout.groups)):
            ids = pool.hold(group, all_rows(pool, group))
            assert ids.min() == rows_per_slab(pool, group)
            assert pool.num_free(group) == 0
            pool.release(group, ids)


def test_the_capacity_leaves_the_null_slab_out() -> None:
    pool = Pool(packed_layout(HYBRID, 2))
    assert pool.num_free(0) == rows_per_slab(pool, 0)
    with pytest.raises(OutOfBlocks):
        pool.hold(0, rows_per_slab(pool, 0) + 1)


def test_sharing_cached_content_keeps_its_generation_and_new_content_does_not() -> None:
    pool = Pool(packed_layout((layer("a"),), 3))
    ids = cache(pool, 0, 2)
    before = pool.generations[0][ids].copy()
    pool.share(0, ids)
    assert (pool.generations[0][ids] == before).all()
    pool.release(0, ids)
    pool.hold(0, 2)
    assert (pool.generations[0][ids] > before).all()


def test_generations_move_to_memory_that_others_read_and_go_on_there() -> None:
    layout = packed_layout(HYBRID, 4)
    pool = Pool(layout)
    first = pool.hold(0, 2)
    memory = [np.full(layout.num_blocks(g), 7, np.int64) for g in range(len(layout.groups))]
    pool.place_generations(memory)
    ids = pool.hold(0, 2)
    assert memory[0][first].tolist() == memory[0][ids].tolist() == [1, 1]
    assert pool.generations[0] is memory[0]


def test_quarantined_rows_come_back_only_from_quarantine() -> None:
    pool = Pool(packed_layout((layer("a"),), 3))
    ids = pool.hold(0, 2)
    pool.keep(0, ids)
    pool.quarantine(0, ids[:1])
    pool.release(0, ids)
    assert pool.num_cached(0) == 1
    assert pool.hold(0, 1).tolist() == ids[1:].tolist()
    with pytest.raises(OutOfBlocks):
        pool.hold(0, 1)
    pool.unquarantine(0, ids[:1])
    assert pool.hold(0, 1).tolist() == ids[:1].tolist()


def test_nobody_can_give_back_the_hold_of_the_quarantine() -> None:
    pool = Pool(packed_layout((layer("a"),), 3))
    ids = pool.hold(0, 2)
    pool.quarantine(0, ids[:1])
    pool.release(0, ids)
    with pytest.raises(BlockError, match=f"block {ids[0]} is released more often than it is held"):
        pool.release(0, ids[:1])
    assert pool.quarantined(0).tolist() == ids[:1].tolist()
    pool.check()


def test_a_row_that_was_quarantined_is_never_cached() -> None:
    """A late writer may have changed it, whatever was asked for and in whichever order."""
    pool = Pool(packed_layout((layer("a"),), 3))
    ids = pool.hold(0, 2)
    pool.quarantine(0, ids)
    with pytest.raises(BlockError, match="was quarantined, its content is not known"):
        pool.keep(0, ids)
    pool.release(0, ids[:1])
    pool.unquarantine(0, ids)
    with pytest.raises(BlockError, match="was quarantined, its content is not known"):
        pool.keep(0, ids[1:])
    pool.release(0, ids[1:])
    assert (pool.num_cached(0), pool.num_held(0), pool.num_free(0)) == (0, 0, 2)
    assert sorted(cache(pool, 0, 2).tolist()) == ids.tolist(), "new content can be cached again"
    pool.check()


def test_rows_that_are_not_trusted_are_not_cached_until_they_are() -> None:
    pool = Pool(packed_layout((layer("a"),), 4))
    ids = pool.hold(0, 3)
    pool.keep(0, ids[:1])
    pool.distrust(0, ids)
    assert not pool.kept(0, ids).any()
    assert pool.suspect(0, ids).all()
    with pytest.raises(BlockError, match="content is not known"):
        pool.keep(0, ids[:1])
    pool.trust(0, ids[:2])
    pool.keep(0, ids[:2])
    pool.check()
    pool.release(0, ids)
    pool.check()
    assert pool.num_cached(0) == 2
    assert not pool.suspect(0, pool.hold(0, 3)).any()


def test_rows_that_lack_something_are_known_and_not_cached() -> None:
    pool = Pool(packed_layout((layer("a"),), 4))
    ids = pool.hold(0, 3)
    pool.distrust(0, ids)
    assert pool.unknown(0, ids).all()
    pool.trust(0, ids[:2], np.array([True, False]))
    assert pool.unknown(0, ids).tolist() == [False, False, True]
    assert pool.suspect(0, ids).tolist() == [False, True, True]
    with pytest.raises(BlockError, match="content is not known"):
        pool.keep(0, ids[1:2])
    pool.check()
    pool.release(0, ids)
    pool.check()
    assert not pool.unknown(0, pool.hold(0, 3)).any()


def test_trust_does_not_end_a_quarantine() -> None:
    pool = Pool(packed_layout((layer("a"),), 3))
    ids = pool.hold(0, 2)
    pool.quarantine(0, ids)
    pool.trust(0, ids)
    assert pool.suspect(0, ids).all()
    assert pool.unknown(0, ids).all()
    pool.check()


def test_a_quarantine_makes_every_ticket_for_its_rows_worthless() -> None:
    pool = Pool(packed_layout((layer("a"),), 4))
    ids = pool.hold(0, 3)
    ticket = pool.generations[0][ids].copy()
    pool.quarantine(0, ids[:2])
    inside = pool.generations[0][ids].copy()
    assert (inside - ticket).tolist() == [1, 1, 0]
    pool.unquarantine(0, ids[:2])
    assert (pool.generations[0][ids] - inside).tolist() == [1, 1, 0], "a ticket made meanwhile"
    pool.release(0, ids)
    pool.hold(0, 3)
    assert (pool.generations[0][ids] > inside).all()


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


def test_the_first_thread_that_changes_a_pool_owns_it_and_questions_are_free() -> None:
    pool = Pool(packed_layout((layer("a"),), 6))
    assert in_thread(lambda: pool.hold(0, 2)) is None
    assert pool.num_held(0) == 2
    with pytest.raises(WrongThread, match="thread"):
        pool.hold(0, 1)


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


@pytest.mark.parametrize("ids", [[-1], [10**6], [0], [3, 4]])
def test_releasing_what_is_not_held_names_the_block(ids: list[int]) -> None:
    pool = Pool(packed_layout((layer("a"),), 6))
    pool.hold(0, 3)
    with pytest.raises(BlockError, match="block"):
        pool.release(0, ids)
    with pytest.raises(BlockError):
        pool.keep(0, [5])
    with pytest.raises(BlockError):
        pool.share(0, [5])


def test_a_single_id_is_a_list_of_one() -> None:
    pool = Pool(packed_layout((layer("a"),), 6))
    row = int(pool.hold(0, 1)[0])
    pool.share(0, row)
    assert pool.holds(0, row).tolist() == [2]
    pool.release(0, np.int64(row))
    pool.release(0, row)
    assert pool.num_held(0) == 0


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
