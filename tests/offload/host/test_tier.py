import numpy as np
import pytest

from kvstow.errors import StoreError
from kvstow.offload.host.tier import HostTier
from kvstow.offload.rows import pooled, same_rows
from offloading import hybrid, key, random_rows

KIB = 1 << 10


@pytest.fixture
def tier():
    tier = HostTier(hybrid(), capacity=64 * KIB)
    yield tier
    tier.check()
    tier.close()


def stored(tier, group, numbers):
    rows = [random_rows(tier.layout.row_bytes(group), 1, n)[0] for n in numbers]
    keys = [key(group, n) for n in numbers]
    return keys, rows, tier.store(group, keys, rows)


def loaded(tier, group, keys):
    rows = [np.zeros(tier.layout.row_bytes(group), np.uint8) for _ in keys]
    return tier.load(group, keys, rows), rows


@pytest.mark.parametrize("order", ["LBHNC", "LHBNC", "BLHNC", "BHLNC"])
def test_host_rows_are_the_arenas_rows_where_those_are_rows(order):
    layout = hybrid(order=order)
    host = pooled(layout, 64 * KIB)
    for group in range(len(layout.groups)):
        single = len(layout.footprints[group].strips) == 1
        assert same_rows(layout, group, host, group) == single
        assert len(host.footprints[group].strips) == 1


def test_rows_come_back_and_only_their_own_bytes_change(tier):
    before = tier.arena.bytes.numpy().copy()
    keys, rows, kept = stored(tier, 1, range(5))
    changed = np.flatnonzero(tier.arena.bytes.numpy() != before)
    with tier.held(1, keys) as (mask, ids):
        owned = {
            byte
            for i in ids
            for run in tier.layout.runs(1, int(i))
            for byte in range(run.offset, run.end)
        }
    assert kept.all()
    assert mask.all()
    assert set(changed.tolist()) <= owned
    found, got = loaded(tier, 1, [*keys, b"unknown"])
    assert found.tolist() == [True] * 5 + [False]
    assert all((a == b).all() for a, b in zip(rows, got, strict=False))
    assert tier.counts.hits == 5
    assert tier.counts.misses == 1


def test_a_tier_that_is_too_small_serves_only_what_was_stored():
    tier = HostTier(hybrid(), capacity=64 * KIB)
    dice = np.random.default_rng(2)
    for _ in range(60):
        group = int(dice.integers(2))
        keys, rows, kept = stored(tier, group, np.unique(dice.integers(0, 300, 20)).tolist())
        found, got = loaded(tier, group, keys)
        assert (found == kept).all()
        assert all((a == b).all() for a, b, ok in zip(rows, got, found, strict=False) if ok)
        tier.check()
    tier.close()


def test_of_rows_that_nobody_reads_those_used_longest_ago_go_first(tier):
    keys, _rows, kept = stored(tier, 0, range(400))
    there = [k for k, is_kept in zip(keys, kept, strict=True) if is_kept]
    used, unused = there[: len(there) // 4], there[len(there) // 4 :]
    loaded(tier, 0, used)
    stored(tier, 0, range(1000, 1000 + len(unused) // 2))
    assert tier.contains(0, used).all()
    assert not tier.contains(0, unused).all()


def test_held_rows_stay_whatever_comes(tier):
    keys, _rows, _kept = stored(tier, 0, range(10))
    with tier.held(0, keys) as (mask, ids):
        before = [view.copy() for view in tier.views(0, ids)]
        for start in range(1000, 3000, 50):
            stored(tier, 0, range(start, start + 50))
            stored(tier, 1, range(start, start + 50))
        assert all((a == b).all() for a, b in zip(before, tier.views(0, ids), strict=False))
        assert tier.evict(0, keys) == 0
        assert mask.all()
        assert tier.contains(0, keys).all()
    assert tier.evict(0, keys) == 10


def test_reserved_rows_are_nobodys_until_they_are_kept(tier):
    reservation = tier.reserve(0, [b"a", b"b", b"a"])
    assert reservation.keys == (b"a", b"b")
    assert not tier.contains(0, [b"a"]).any()
    for start in range(0, 2000, 50):
        stored(tier, 0, range(start, start + 50))
    for view in tier.views(0, reservation.ids):
        view[:] = 7
    tier.keep(reservation, np.array([True, False]))
    found, got = loaded(tier, 0, [b"a", b"b"])
    assert found.tolist() == [True, False]
    assert (got[0] == 7).all()


def test_an_abandoned_reservation_leaves_the_tier_as_it_was(tier):
    used = tier.usage
    tier.abandon(tier.reserve(0, [b"a", b"b"]))
    assert tier.usage == used
    assert len(tier.reserve(0, [b"a"]).keys) == 1


def test_two_reservations_of_one_key_keep_one_row(tier):
    one, other = tier.reserve(0, [b"a"]), tier.reserve(0, [b"a"])
    for reservation, value in ((one, 1), (other, 2)):
        tier.views(0, reservation.ids)[0][:] = value
        tier.keep(reservation)
    found, got = loaded(tier, 0, [b"a"])
    assert found.all()
    assert (got[0] == 1).all()
    assert tier.usage.rows == 1


def test_slabs_pass_to_the_group_that_is_used(tier):
    keys, _, kept = stored(tier, 0, range(400))
    _new, _rows, got = stored(tier, 1, range(400))
    assert got.sum() > 20
    assert not tier.contains(0, keys).all() or not kept.all()
    again, _, _ = stored(tier, 0, range(5000, 5010))
    assert tier.contains(0, again).all()


def test_a_tier_too_small_for_two_slabs_is_refused_with_the_least():
    with pytest.raises(StoreError, match="hint: give at least"):
        HostTier(hybrid(), capacity=100)


def test_a_listener_that_raises_keeps_no_row_from_being_kept_or_given_back(caplog):
    def fails(group, keys):
        raise RuntimeError("on purpose")

    tier = HostTier(hybrid(), capacity="64KiB", on_change=fails)
    for number in range(200):  # more than there is room for
        reservation = tier.reserve(0, [key(0, 2 * number), key(0, 2 * number + 1)])
        tier.keep(reservation, np.array([True, False]))
        tier.check()
        assert tier.contains(0, [key(0, 2 * number), key(0, 2 * number + 1)]).tolist() == [
            True,
            False,
        ]
    assert "on purpose" in caplog.text
    tier.close()
