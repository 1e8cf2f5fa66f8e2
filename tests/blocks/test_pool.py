"""What a pool promises beyond sets of ids: runs, gaps, who loses a slab, what it says."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from block_layouts import HYBRID, MIXED, RECURRENT, layer, packed_layout
from kvstow.blocks.placement import EvictionCandidates, RowDemand, lru
from kvstow.blocks.pool import Pool
from kvstow.blocks.runs import fewest_runs, num_runs
from kvstow.errors import BlockError, OutOfBlocks, PlanError
from kvstow.plan.group import grouped
from kvstow.plan.pack import separate, union


def rows_per_slab(pool: Pool, group: int) -> int:
    return pool.layout.groups[group].rows_per_slab


def all_rows(pool: Pool, group: int) -> int:
    return (pool.layout.num_slabs - 1) * rows_per_slab(pool, group)


def cache(pool: Pool, group: int, count: int) -> np.ndarray:
    ids = pool.hold(group, count)
    pool.keep(group, ids)
    pool.release(group, ids)
    return ids


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


def test_a_hold_is_one_ascending_run_in_a_fresh_pool() -> None:
    for layers in (HYBRID, (layer("a"),)):
        pool = Pool(packed_layout(layers, 300))
        for count in (1, 2, 17, 200):
            assert num_runs(pool.hold(0, count)) == 1


def test_a_hold_takes_the_tightest_run_that_fits() -> None:
    pool = Pool(packed_layout((layer("a"),), 100))
    ids = pool.hold(0, 60)
    pool.release(0, np.concatenate((ids[5:15], ids[20:24], ids[30:50])))
    assert pool.hold(0, 4).tolist() == ids[20:24].tolist()
    assert pool.hold(0, 9).tolist() == ids[5:14].tolist()


def test_a_hold_that_fits_nowhere_takes_the_longest_runs() -> None:
    assert fewest_runs(np.array([1, 2, 3, 7, 9, 10, 11, 12]), 6).tolist() == [1, 2, 9, 10, 11, 12]
    assert fewest_runs(np.array([4]), 1).tolist() == [4]
    assert fewest_runs(np.array([4, 6]), 2).tolist() == [4, 6]


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 70), st.integers(1, 9))
def test_the_longest_runs_are_taken_and_no_more_than_asked_for(
    chosen: set[int], count: int, most: int
) -> None:
    ids = np.array(sorted(chosen))
    lengths = sorted(
        (len(run) for run in np.split(ids, np.nonzero(np.diff(ids) != 1)[0] + 1)), reverse=True
    )
    found = fewest_runs(ids, count, most=most)
    assert set(found.tolist()) <= chosen
    assert len(found) == min(count, sum(lengths[:most]))
    assert num_runs(found) <= most
    assert (found[1:] > found[:-1]).all()
    every = fewest_runs(ids, count)
    assert len(every) == min(count, len(ids))
    assert num_runs(every) == next(
        (n for n in range(1, len(lengths)) if sum(lengths[:n]) >= count), len(lengths)
    )


def test_partly_used_slabs_are_filled_before_another_one_is_opened() -> None:
    pool = Pool(packed_layout(RECURRENT, 40))
    size = rows_per_slab(pool, 0)
    assert size > 3
    first = pool.hold(0, size - 2)
    second = pool.hold(0, 2)
    assert set(np.concatenate((first, second)) // size) == {first[0] // size}


def test_whole_slabs_come_free() -> None:
    pool = Pool(packed_layout(RECURRENT, 6))
    before = pool.num_free(1)
    ids = pool.hold(0, 2 * rows_per_slab(pool, 0))
    assert pool.num_free(1) < before
    pool.release(0, ids)
    assert pool.num_free(1) == before


def test_when_slabs_are_scarce_what_stays_goes_low_and_what_does_not_goes_high() -> None:
    pool = Pool(packed_layout(HYBRID, 12))
    size = rows_per_slab(pool, 0)
    assert size > 1
    ids = pool.hold(0, all_rows(pool, 0))
    gaps = ids[::size]
    pool.release(0, gaps)
    moving, brief = pool.hold_all([RowDemand(0, 3, "moving"), RowDemand(0, 3, "brief")])
    assert moving.tolist() == gaps[:3].tolist()
    assert brief.tolist() == gaps[-3:].tolist()
    grown = pool.hold_all([RowDemand(0, 2, "moving", gaps[-4:-2] - 1)])[0]
    assert sorted(grown.tolist()) == gaps[3:5].tolist()
    pool.check()


def test_a_slab_is_taken_for_good_only_when_all_gaps_are_filled() -> None:
    pool = Pool(packed_layout(HYBRID, 40))
    size = rows_per_slab(pool, 0)
    ids = pool.hold(0, all_rows(pool, 0) - size)
    pool.release(0, ids[::size])
    pool.hold_all([RowDemand(0, len(ids[::size]), "moving")])
    assert pool.num_free(1) == rows_per_slab(pool, 1), "the last slab is still nobody's"
    pool.hold_all([RowDemand(0, 1, "moving")])
    assert pool.num_free(1) == 0


def test_a_long_prompt_fills_gaps_where_that_at_most_doubles_its_runs() -> None:
    pool = Pool(packed_layout(HYBRID, 60))
    size = rows_per_slab(pool, 0)
    ids = pool.hold(0, all_rows(pool, 0) - 2 * size).reshape(-1, size)
    pool.release(0, ids[:20, 0])
    rows = pool.hold(0, 2 * size)
    in_gaps = np.isin(rows, ids[:20, 0])
    assert 0 < in_gaps.sum() == 4 // size * size, "four runs at most, and whole slabs besides"
    assert pool.num_free(1) == 4 // size * rows_per_slab(pool, 1)
    pool.check()


def test_a_growing_request_gets_the_row_behind_its_last_one() -> None:
    pool = Pool(packed_layout((layer("a"),), 50))
    a, b = pool.hold(0, 3), pool.hold(0, 3)
    pool.release(0, b)
    (more,) = pool.hold_all([RowDemand(0, 1, "single", a[-1:])])
    assert more[0] == a[-1] + 1


def test_two_that_grow_behind_one_row_get_different_rows() -> None:
    pool = Pool(packed_layout((layer("a"),), 50))
    last = pool.hold(0, 1)
    (more,) = pool.hold_all([RowDemand(0, 2, "single", np.repeat(last, 2))])
    assert len(set(more.tolist())) == 2


def test_cached_rows_are_evicted_oldest_first_and_only_when_needed() -> None:
    pool = Pool(packed_layout((layer("a"),), 7))
    gone: list[int] = []
    pool.on_evict.append(lambda group, ids: gone.extend(ids.tolist()))
    old, young = cache(pool, 0, 2), cache(pool, 0, 2)
    pool.hold(0, 2)
    assert gone == []
    pool.hold(0, 2)
    assert sorted(gone) == old.tolist()
    pool.hold(0, 1)
    assert gone[-1] == young[-1], "the last block of a prompt goes before its first"


def test_a_hit_makes_a_row_young_again() -> None:
    pool = Pool(packed_layout((layer("a"),), 5))
    old, young = cache(pool, 0, 2), cache(pool, 0, 2)
    pool.share(0, old)
    pool.release(0, old)
    assert sorted(pool.hold(0, 2).tolist()) == young.tolist()


def test_a_plain_function_decides_what_is_evicted() -> None:
    def youngest(candidates: EvictionCandidates, count: int) -> np.ndarray:
        return np.argsort(-candidates.last_use, kind="stable")[:count]

    assert lru(EvictionCandidates(0, np.arange(3), np.arange(3)), 2).tolist() == [0, 1]
    pool = Pool(packed_layout((layer("a"),), 5), policy=youngest)
    cache(pool, 0, 2)
    young = cache(pool, 0, 2)
    assert sorted(pool.hold(0, 2).tolist()) == young.tolist()


def test_a_slab_that_changes_hands_loses_cached_rows_and_never_held_ones() -> None:
    pool = Pool(packed_layout(RECURRENT, 3))
    size = rows_per_slab(pool, 0)
    held = pool.hold(0, 1)
    cached = cache(pool, 0, 2 * size - 1)
    gone: list[int] = []
    pool.on_evict.append(lambda group, ids: gone.extend(ids.tolist()))
    pool.hold(1, 1)
    assert set(gone) == {row for row in cached.tolist() if row // size != held[0] // size}
    assert pool.holds(0, held).tolist() == [1]
    with pytest.raises(OutOfBlocks):
        pool.hold(1, rows_per_slab(pool, 1))


def test_the_slab_with_the_fewest_cached_rows_changes_hands() -> None:
    pool = Pool(packed_layout(RECURRENT, 3))
    size = rows_per_slab(pool, 0)
    many = pool.hold(0, size)
    few = pool.hold(0, size)
    pool.keep(0, many)
    pool.keep(0, few[:1])
    pool.release(0, many)
    pool.release(0, few)
    gone: list[int] = []
    pool.on_evict.append(lambda group, ids: gone.extend(ids.tolist()))
    pool.hold(1, 1)
    assert gone == few[:1].tolist()


def test_sharing_cached_content_keeps_its_generation_and_new_content_does_not() -> None:
    pool = Pool(packed_layout((layer("a"),), 3))
    ids = cache(pool, 0, 2)
    before = pool.generations[0][ids].copy()
    pool.share(0, ids)
    assert (pool.generations[0][ids] == before).all()
    pool.release(0, ids)
    pool.hold(0, 2)
    assert (pool.generations[0][ids] > before).all()


def test_rows_of_the_old_owner_are_fenced_when_a_slab_changes_hands() -> None:
    pool = Pool(packed_layout(RECURRENT, 2))
    ids = pool.hold(0, 1)
    pool.release(0, ids)
    ticket = int(pool.generations[0][ids[0]])
    pool.hold(1, 1)
    assert pool.generations[0][ids[0]] > ticket


def test_generations_live_in_the_memory_that_was_given() -> None:
    layout = packed_layout(HYBRID, 4)
    memory = [np.full(layout.num_blocks(g), 7, np.int64) for g in range(len(layout.groups))]
    pool = Pool(layout, generations=memory)
    ids = pool.hold(0, 2)
    assert memory[0][ids].tolist() == [8, 8]


@pytest.mark.parametrize(
    "wrong", [lambda n: np.zeros(n - 1, np.int64), lambda n: np.zeros(n, np.int32),
              lambda n: np.zeros(2 * n, np.int64)[::2]]
)  # fmt: skip
def test_generations_of_another_shape_are_refused(wrong) -> None:
    layout = packed_layout((layer("a"),), 4)
    with pytest.raises(PlanError, match="generations"):
        Pool(layout, generations=[wrong(layout.num_blocks(0))])
    with pytest.raises(PlanError, match="2 generation arrays for 1 groups"):
        Pool(layout, generations=[np.zeros(4, np.int64)] * 2)


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
        "renew": lambda: pool.renew(0, ids),
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
    assert isinstance(error, BlockError)
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
    with pytest.raises(BlockError, match="thread"):
        pool.hold(0, 1)


def test_a_pool_that_is_handed_over_belongs_to_the_next_thread_that_changes_it() -> None:
    pool = Pool(packed_layout((layer("a"),), 6))
    pool.hold(0, 1)
    pool.hand_over()
    assert in_thread(lambda: pool.hold(0, 1)) is None
    with pytest.raises(BlockError, match="thread"):
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


def test_groups_that_share_nothing_run_out_alone() -> None:
    pool = Pool(separate(grouped(HYBRID), num_slabs=4, context_tokens=8))
    pool.hold(0, pool.num_free(0))
    assert pool.num_free(1) == all_rows(pool, 1)
    pool.hold(1, pool.num_free(1))


def test_one_row_per_slab_is_the_union_of_all_groups() -> None:
    pool = Pool(union(grouped(HYBRID), num_slabs=5))
    a, b = pool.hold(0, 2), pool.hold(1, 2)
    assert not set(a.tolist()) & set(b.tolist())
    assert pool.num_free(2) == 0


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
    with pytest.raises(BlockError, match="held: 3 counted, 4 expected"):
        pool.check()
