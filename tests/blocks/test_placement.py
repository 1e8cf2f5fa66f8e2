"""Placement: runs while there is room, gaps when there is none, and who is evicted."""

import numpy as np

from block_layouts import (
    HYBRID,
    RECURRENT,
    all_rows,
    cache,
    layer,
    packed_layout,
    rows_per_slab,
)
from kvstow.blocks.placement import RowDemand
from kvstow.blocks.pool import Pool
from kvstow.blocks.rows import num_runs


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


def test_partly_used_slabs_are_filled_before_another_one_is_opened() -> None:
    pool = Pool(packed_layout(RECURRENT, 40))
    size = rows_per_slab(pool, 0)
    assert size > 3
    first = pool.hold(0, size - 2)
    second = pool.hold(0, 2)
    assert set(np.concatenate((first, second)) // size) == {first[0] // size}


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
