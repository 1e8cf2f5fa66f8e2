"""The watch over tiers: what came and went is told once, whoever has evicted it."""

import numpy as np
import numpy.typing as npt
import pytest

from kvstow.errors import StoreError
from kvstow.offload.watch import LOOKS, TierChange, TierWatch
from kvstow.threads import broken_threads
from waiting import wait_for


class Keys:
    """A tier, as far as the watch asks it."""

    def __init__(self, name: str) -> None:
        self.name, self.rows = name, set[bytes]()
        self.asked = 0
        self.fails = False

    def contains(self, group: int, keys: list[bytes]) -> npt.NDArray[np.bool_]:
        self.asked += len(keys)
        if self.fails:
            raise StoreError("the index is locked")
        return np.array([key in self.rows for key in keys], bool)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watch_of(clock: Clock, *names: str) -> tuple[TierWatch, dict[str, Keys]]:
    tiers = {name: Keys(name) for name in names}
    return TierWatch([*tiers.values()], clock=clock), tiers  # pyright: ignore[reportArgumentType]


def turned(watch: TierWatch) -> list[TierChange]:
    watch.turn()
    return watch.take()


def test_rows_are_told_when_they_come_to_each_tier_and_when_they_go():
    clock = Clock()
    watch, tiers = watch_of(clock, "host", "disk")
    tiers["host"].rows |= {b"a", b"b"}
    watch.note(0, [b"a", b"b"])
    assert turned(watch) == [TierChange("host", 0, (b"a", b"b"), True)]
    clock.now = 0.6
    tiers["disk"].rows |= {b"a"}
    assert turned(watch) == [TierChange("disk", 0, (b"a",), True)]
    tiers["host"].rows.discard(b"a")
    assert turned(watch) == [TierChange("host", 0, (b"a",), False)]
    assert turned(watch) == []
    tiers["host"].rows.clear()
    tiers["disk"].rows.clear()
    assert turned(watch) == [
        TierChange("host", 0, (b"b",), False),
        TierChange("disk", 0, (b"a",), False),
    ]


def test_every_key_is_looked_at_again_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstow.offload.watch.SLICE", 4)
    clock = Clock()
    watch, tiers = watch_of(clock, "host")
    keys = [bytes([k]) for k in range(10)]
    tiers["host"].rows |= set(keys)
    watch.note(1, keys)
    watch.turn()
    watch.take()
    tiers["host"].rows.clear()
    gone = [key for _ in range(3) for change in turned(watch) for key in change.keys]
    assert sorted(gone) == keys


def test_keys_that_turn_up_nowhere_are_forgotten():
    clock = Clock()
    watch, tiers = watch_of(clock, "host")
    watch.note(0, [b"x"])
    for at in LOOKS:
        clock.now = at
        assert turned(watch) == []
    clock.now = LOOKS[-1] + 1
    watch.turn()
    before = tiers["host"].asked
    watch.turn()
    assert tiers["host"].asked == before


def test_a_remote_store_is_asked_for_new_keys_only():
    clock = Clock()
    watch, tiers = watch_of(clock, "host", "remote")
    tiers["host"].rows.add(b"x")
    tiers["remote"].rows.add(b"x")
    watch.note(0, [b"x"])
    assert [change.tier for change in turned(watch)] == ["host", "remote"]
    for _ in range(5):
        clock.now += 1
        watch.turn()
    assert tiers["remote"].asked == 1
    tiers["remote"].rows.clear()
    watch.note(0, [b"x"])
    assert turned(watch) == [TierChange("remote", 0, (b"x",), False)]


def test_more_keys_than_allowed_are_not_watched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstow.offload.watch.MOST_KEYS", 2)
    watch, tiers = watch_of(Clock(), "host")
    tiers["host"].rows |= {b"a", b"b", b"c"}
    watch.note(0, [b"a", b"b", b"c"])
    assert turned(watch) == [TierChange("host", 0, (b"a", b"b"), True)]


def test_the_thread_turns_by_itself_and_ends():
    clock = Clock()
    watch, tiers = watch_of(clock, "host")
    tiers["host"].rows.add(b"a")
    watch.note(0, [b"a"])
    watch.start()
    changes: list[TierChange] = []
    while not changes:
        changes = watch.take()
    watch.close()
    assert changes == [TierChange("host", 0, (b"a",), True)]


def test_a_thread_that_breaks_is_counted_and_the_watch_can_be_closed():
    watch, tiers = watch_of(Clock(), "host")
    before = broken_threads().get("kvstow-watch", 0)
    tiers["host"].contains = lambda group, keys: [][0]
    watch.note(0, [b"a"])
    watch.start()
    wait_for(lambda: broken_threads().get("kvstow-watch", 0) == before + 1, 20)
    watch.close()


def test_a_tier_that_fails_for_a_while_is_asked_again_and_the_others_meanwhile():
    clock = Clock()
    watch, tiers = watch_of(clock, "host", "disk", "remote")
    for tier in tiers.values():
        tier.rows.add(b"a")
    tiers["disk"].fails = tiers["remote"].fails = True
    watch.note(0, [b"a"])
    watch.start()
    wait_for(lambda: tiers["remote"].asked, 20)
    tiers["disk"].fails = tiers["remote"].fails = False
    clock.now = LOOKS[1]
    told: list[TierChange] = []
    wait_for(lambda: told.extend(watch.take()) or len(told) == 3, 20)
    watch.close()
    assert [change.tier for change in told] == ["host", "disk", "remote"]
