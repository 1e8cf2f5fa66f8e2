"""Each policy against the published algorithm, written down naively on Python lists."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.offload.eviction.admission import SecondTouch
from kvstow.offload.eviction.policies import Arc, Lru, S3Fifo, policy


class Cache:
    """A cache of `size` slots that asks one of our policies whom to give up."""

    def __init__(self, name, size):
        self.policy = policy(name, size)
        self.slot, self.free = {}, list(range(size))
        self.nothing = np.zeros(size, bool)

    def request(self, item):
        if item in self.slot:
            self.policy.touch(np.array([self.slot[item]]))
            return True
        if not self.free:
            (victim,) = self.policy.victims([item], self.nothing).tolist()
            gone = next(known for known, slot in self.slot.items() if slot == victim)
            del self.slot[gone]
            self.free.append(victim)
        self.slot[item] = self.free.pop()
        self.policy.insert(np.array([self.slot[item]]), [item])
        return False


def naive_lru(size, trace):
    kept = OrderedDict()
    for item in trace:
        hit = item in kept
        kept[item] = None
        kept.move_to_end(item)
        if len(kept) > size:
            kept.popitem(last=False)
        yield hit


def naive_arc(c, trace):
    """Megiddo and Modha, FAST 2003, figure 4; lists with the oldest first."""
    t1, t2, b1, b2, p = [], [], [], [], 0.0

    def replace(x):
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p)):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in trace:
        hit = x in t1 or x in t2
        if hit:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:
            p = min(c, p + max(1, len(b2) / len(b1)))
            replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            p = max(0, p - max(1, len(b1) / len(b2)))
            replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(b1) + len(t2) + len(b2) >= c:
                if len(t1) + len(b1) + len(t2) + len(b2) == 2 * c:
                    b2.pop(0)
                if len(t1) + len(t2) == c:
                    replace(x)
            t1.append(x)
        yield hit


def naive_s3fifo(size, trace):
    """Yang et al., SOSP 2023, algorithm 1; lists with the oldest first."""
    small, main, ghost, uses = [], [], [], {}

    def evict_small():
        while small:
            t = small.pop(0)
            if uses[t] > 1:
                main.append(t)
            else:
                ghost.append(t)
                while len(ghost) > round(0.9 * size):
                    ghost.pop(0)
                return

    def evict_main():
        while main:
            t = main.pop(0)
            if uses[t] == 0:
                return
            uses[t] -= 1
            main.append(t)

    for x in trace:
        hit = x in small or x in main
        if hit:
            uses[x] = min(3, uses[x] + 1)
        else:
            was_ghost = x in ghost
            while len(small) + len(main) >= size:
                if len(small) >= 0.1 * size:
                    evict_small()
                else:
                    evict_main()
            if was_ghost:
                if x in ghost:
                    ghost.remove(x)
                main.append(x)
            else:
                small.append(x)
            uses[x] = 0
        yield hit


NAIVE = {"lru": naive_lru, "arc": naive_arc, "s3fifo": naive_s3fifo}


@pytest.mark.parametrize("name", NAIVE)
@given(
    size=st.sampled_from([1, 2, 3, 5, 10, 17]),
    trace=st.lists(st.integers(1, 30), max_size=300),
)
def test_a_policy_hits_where_the_published_algorithm_hits(name, size, trace):
    cache = Cache(name, size)
    assert [cache.request(item) for item in trace] == list(NAIVE[name](size, trace))
    assert len(cache.policy) == len(cache.slot)


@pytest.mark.parametrize("name", NAIVE)
def test_a_policy_hits_where_the_published_algorithm_hits_on_a_skewed_trace(name):
    dice = np.random.default_rng(4)
    trace = (dice.zipf(1.2, 6000) % 1000 + 1).tolist()
    cache = Cache(name, 60)
    assert [cache.request(item) for item in trace] == list(NAIVE[name](60, trace))


def test_lru_worked_by_hand():
    cache = Cache("lru", 2)
    assert [cache.request(x) for x in (1, 2, 1, 3, 1, 2)] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]


def test_arc_keeps_what_was_used_twice_while_a_scan_passes():
    cache = Cache("arc", 4)
    for x in (1, 2, 1, 2, *range(100, 140)):
        cache.request(x)
    assert cache.request(1)
    assert cache.request(2)
    lru = Cache("lru", 4)
    for x in (1, 2, 1, 2, *range(100, 140)):
        lru.request(x)
    assert not lru.request(1)


def test_s3fifo_drops_what_is_used_once_before_what_is_used_often():
    cache = Cache("s3fifo", 10)
    for x in (1, 1, 1, *range(100, 130)):
        cache.request(x)
    assert cache.request(1)


@pytest.mark.parametrize("kind", [Lru, Arc, S3Fifo])
def test_pinned_rows_are_never_victims(kind):
    policy = kind(6)
    policy.insert(np.arange(6), range(10, 16))
    pinned = np.array([True, False, True, True, False, True])
    assert sorted(policy.victims([1, 2, 3], pinned).tolist()) == [1, 4]
    assert len(policy) == 4
    assert policy.victims([7], pinned).tolist() == []
    assert len(policy.victims([7], np.zeros(6, bool))) == 1


@pytest.mark.parametrize("kind", [Lru, Arc, S3Fifo])
def test_removed_rows_are_never_victims(kind):
    policy = kind(4)
    policy.insert(np.arange(4), range(4))
    policy.remove(np.array([0, 2]))
    assert sorted(policy.victims([9, 9, 9], np.zeros(4, bool)).tolist()) == [1, 3]


@pytest.mark.parametrize("kind", [Lru, Arc, S3Fifo])
def test_touching_what_is_not_there_changes_nothing(kind):
    policy = kind(3)
    policy.insert(np.array([1]), [5])
    policy.touch(np.array([0, 1, 2, 1]))
    assert len(policy) == 1
    assert policy.victims([1, 2], np.zeros(3, bool)).tolist() == [1]


def test_the_second_touch_passes_and_the_first_seldom_does():
    dice = np.random.default_rng(0)
    seen = SecondTouch(window=1000)
    marks = dice.integers(0, 1 << 63, 500, dtype=np.uint64)
    assert seen.admits(marks).mean() < 0.02
    assert seen.admits(marks).all()


def test_the_filter_forgets_what_was_seen_long_ago():
    dice = np.random.default_rng(0)
    seen = SecondTouch(window=100)
    old = dice.integers(0, 1 << 63, 50, dtype=np.uint64)
    seen.admits(old)
    for _ in range(10):
        seen.admits(dice.integers(0, 1 << 63, 100, dtype=np.uint64))
    assert seen.admits(old).mean() < 0.05
