"""Each policy against the published algorithm, written down naively on Python lists."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.offload.host.eviction import Lru, S3Fifo, policy


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
            (victim,) = self.policy.victims(1, self.nothing).tolist()
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
            while len(small) + len(main) >= size:
                if len(small) >= 0.1 * size:
                    evict_small()
                else:
                    evict_main()
            if x in ghost:
                ghost.remove(x)
                main.append(x)
            else:
                small.append(x)
            uses[x] = 0
        yield hit


NAIVE = {"lru": naive_lru, "s3fifo": naive_s3fifo}


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


def test_s3fifo_drops_what_is_used_once_before_what_is_used_often():
    cache = Cache("s3fifo", 10)
    for x in (1, 1, 1, *range(100, 130)):
        cache.request(x)
    assert cache.request(1)


@pytest.mark.parametrize("kind", [Lru, S3Fifo])
def test_pinned_rows_are_never_victims(kind):
    policy = kind(6)
    policy.insert(np.arange(6), range(10, 16))
    pinned = np.array([True, False, True, True, False, True])
    assert sorted(policy.victims(3, pinned).tolist()) == [1, 4]
    assert len(policy) == 4
    assert policy.victims(1, pinned).tolist() == []
    assert len(policy.victims(1, np.zeros(6, bool))) == 1


@pytest.mark.parametrize("kind", [Lru, S3Fifo])
def test_removed_rows_are_never_victims(kind):
    policy = kind(4)
    policy.insert(np.arange(4), range(4))
    policy.remove(np.array([0, 2]))
    assert sorted(policy.victims(3, np.zeros(4, bool)).tolist()) == [1, 3]


@pytest.mark.parametrize("kind", [Lru, S3Fifo])
def test_touching_what_is_not_there_changes_nothing(kind):
    policy = kind(3)
    policy.insert(np.array([1]), [5])
    policy.touch(np.array([0, 1, 2, 1]))
    assert len(policy) == 1
    assert policy.victims(2, np.zeros(3, bool)).tolist() == [1]
