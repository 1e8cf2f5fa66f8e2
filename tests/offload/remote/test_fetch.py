"""Objects that come one by one: each is verified and used when it is there, and no sooner."""

from threading import Event, Thread

import numpy as np
import pytest

from kvstow.offload.keys import block_keys
from kvstow.offload.remote.client import RemoteOptions, StoreUnreachable, open_client
from kvstow.offload.remote.tier import RemoteTier
from offloading import IDENTITY, numbered_row
from remote_stores import PROMPT, layout_of, ranges_of
from waiting import wait_for

KEYS = block_keys(IDENTITY, PROMPT, 4)
CANARY = 0xA5


class OneByOne:
    """A client that hands over rows, the last one first, when a gate opens for each of them."""

    def __init__(self, url, stored):
        self.client, _ = open_client(url)
        self.stored = stored
        self.gates = [Event() for _ in KEYS]
        self.fails_before = -1
        self.change = lambda data: data

    def __getattr__(self, name):
        return getattr(self.client, name)

    def get(self, wanted, arrived):
        if len(wanted) != len(KEYS):  # the directory's entries and manifests
            self.client.get(wanted, arrived)
        else:
            self._hand_over(ranges_of(self.client, wanted), arrived)

    def _hand_over(self, found, arrived):
        for number, gate in reversed(list(enumerate(self.gates))):
            assert gate.wait(60)
            if number < self.fails_before:
                raise StoreUnreachable("gone in the middle")
            arrived(number, self.change(found[number]))


@pytest.fixture(params=["whole objects", "ranges"])
def tier(request, valkey_url):
    """A tier whose rows come one by one, as whole objects or as ranges of them."""
    writer = RemoteTier(valkey_url, layout_of())
    rows = [numbered_row(writer, 0, n) for n in range(len(KEYS))]
    assert writer.store(0, KEYS, rows).all()
    assert writer.flush(20)
    writer.close()
    layout = layout_of() if request.param == "whole objects" else layout_of(tp=(1, 2))
    client = OneByOne(valkey_url, rows)
    tier = RemoteTier(client, layout, options=RemoteOptions(budget=10.0, load=60.0))
    assert tier.contains(0, KEYS).all()
    yield tier
    for gate in client.gates:
        gate.set()
    tier.close()


class Loading:
    """A load in a thread of its own."""

    def __init__(self, tier):
        self.rows = [np.full(tier.layout.row_bytes(0), CANARY, np.uint8) for _ in KEYS]
        self.found = []
        self._thread = Thread(
            target=lambda: self.found.extend(tier.load(0, KEYS, self.rows).tolist())
        )
        self._thread.start()

    def is_untouched(self, number):
        return bool((self.rows[number] == CANARY).all())

    def ended(self):
        self._thread.join(60)
        assert len(self.found) == len(KEYS)
        return self.found


def expected(tier):
    """The rows as they were stored, or the last two of four heads of each of their pages."""
    stored = tier.client.stored
    if tier.layout.tp == (0, 1):
        return stored
    return [row.reshape(3, 4, -1)[:, 2:].ravel() for row in stored]


def test_a_row_is_there_while_the_others_are_on_their_way(tier):
    wanted = expected(tier)
    loading = Loading(tier)
    for number, gate in reversed(list(enumerate(tier.client.gates))):
        assert all(loading.is_untouched(n) for n in range(number + 1))
        gate.set()
        wait_for(lambda n=number: not loading.is_untouched(n))
    assert all(loading.ended())
    assert all((a == b).all() for a, b in zip(loading.rows, wanted, strict=True))


def test_rows_that_came_before_a_store_failed_are_used_and_the_others_are_misses(tier):
    wanted = expected(tier)
    tier.client.fails_before = 2
    for gate in tier.client.gates:
        gate.set()
    loading = Loading(tier)
    assert loading.ended() == [False] * 2 + [True] * (len(KEYS) - 2)
    assert all(loading.is_untouched(n) for n in range(2))
    assert all((a == b).all() for a, b in zip(loading.rows[2:], wanted[2:], strict=True))
    assert tier.misses.now == {"unreachable": 2}
    assert not tier.breaker.is_open


def test_rows_that_come_after_the_time_limit_touch_nothing_and_those_before_stay(tier):
    wanted = expected(tier)
    tier.options = RemoteOptions(budget=10.0, load=1.0)
    loading = Loading(tier)
    tier.client.gates[-1].set()
    found = loading.ended()
    assert found[:-1] == [False] * (len(KEYS) - 1)
    for gate in tier.client.gates:
        gate.set()
    wait_for(lambda: not tier.breaker.is_open)
    for number, came in enumerate(found):
        assert (loading.rows[number] == (wanted[number] if came else CANARY)).all()
    assert tier.misses.now["unreachable"] == len(KEYS) - sum(found)


def test_an_object_that_is_damaged_on_its_way_is_a_miss_and_the_next_ones_come(tier):
    def damaged(data):
        tier.client.change = lambda data: data
        data[-1] = data[-1].copy()
        data[-1][-1] ^= 1
        return data

    wanted = expected(tier)
    tier.client.change = damaged
    for gate in tier.client.gates:
        gate.set()
    loading = Loading(tier)
    assert loading.ended() == [True] * (len(KEYS) - 1) + [False]
    assert loading.is_untouched(len(KEYS) - 1)
    assert all((a == b).all() for a, b in zip(loading.rows[:-1], wanted[:-1], strict=True))
    assert tier.misses.now == {"damaged": 1}
