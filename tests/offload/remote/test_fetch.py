"""Objects that come one by one: each is verified and used when it is there, and no sooner."""

from threading import Event, Thread

import numpy as np
import pytest

from kvstow.offload.keys import block_keys
from kvstow.offload.remote.client import RemoteOptions, StoreUnreachable, open_client
from kvstow.offload.remote.tier import RemoteTier
from offloading import IDENTITY, numbered_row
from remote_stores import PROMPT, layout_of
from waiting import wait_for

KEYS = block_keys(IDENTITY, PROMPT, 4)
CANARY = 0xA5


class OneByOne:
    """A client that hands over each row when its gate opens."""

    def __init__(self, url, stored):
        self.client, _ = open_client(url)
        self.stored = stored
        self.gates = [Event() for _ in KEYS]
        self.fails_from = len(KEYS)
        self.damaged = -1

    def __getattr__(self, name):
        return getattr(self.client, name)

    def get(self, objects):
        answers = self.client.get(objects)
        for (name, _), parts in zip(objects, answers, strict=True):
            number = next((n for n, k in enumerate(KEYS) if name.endswith(k.hex())), None)
            if number is None:  # the directory's entries and manifests
                continue
            assert self.gates[number].wait(60)
            if number >= self.fails_from:
                raise StoreUnreachable("gone in the middle")
            if number == self.damaged:
                parts[-1] = parts[-1].copy()
                parts[-1][-1] ^= 1
        return answers


@pytest.fixture(params=["whole objects", "ranges"])
def tier(request, valkey_url, monkeypatch):
    """A tier whose rows come one by one, as whole objects or as ranges of them."""
    monkeypatch.setattr("kvstow.offload.remote.fetch.LOT_BYTES", 1)
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
    rows = expected(tier)
    loading = Loading(tier)
    for number, gate in enumerate(tier.client.gates):
        assert all(loading.is_untouched(n) for n in range(number, len(KEYS)))
        gate.set()
        wait_for(lambda n=number: not loading.is_untouched(n))
    assert all(loading.ended())
    assert all((a == b).all() for a, b in zip(loading.rows, rows, strict=True))


def test_rows_that_came_before_a_store_failed_are_used_and_the_others_are_misses(tier):
    rows = expected(tier)
    tier.client.fails_from = len(KEYS) - 2
    for gate in tier.client.gates:
        gate.set()
    loading = Loading(tier)
    assert loading.ended() == [True] * (len(KEYS) - 2) + [False] * 2
    assert all(loading.is_untouched(n) for n in range(len(KEYS) - 2, len(KEYS)))
    assert all((a == b).all() for a, b in zip(loading.rows[:-2], rows[:-2], strict=True))
    assert tier.misses.now == {"unreachable": 2}
    assert not tier.breaker.is_open


def test_rows_that_come_after_the_time_limit_touch_nothing_and_those_before_stay(tier):
    rows = expected(tier)
    tier.options = RemoteOptions(budget=10.0, load=1.0)
    loading = Loading(tier)
    tier.client.gates[0].set()
    result = loading.ended()
    assert result[1:] == [False] * (len(KEYS) - 1)
    for gate in tier.client.gates:
        gate.set()
    wait_for(lambda: not tier.breaker.is_open)
    for number, came in enumerate(result):
        assert (loading.rows[number] == (rows[number] if came else CANARY)).all()
    assert tier.misses.now["unreachable"] == len(KEYS) - sum(result)


def test_an_object_that_is_damaged_on_its_way_is_a_miss_and_the_next_ones_come(tier):
    rows = expected(tier)
    tier.client.damaged = 1
    for gate in tier.client.gates:
        gate.set()
    loading = Loading(tier)
    assert loading.ended() == [number != 1 for number in range(len(KEYS))]
    assert loading.is_untouched(1)
    for number in set(range(len(KEYS))) - {1}:
        assert (loading.rows[number] == rows[number]).all()
    assert tier.misses.now == {"damaged": 1}


def test_an_object_that_several_rows_of_a_lot_share_is_fetched_once(valkey_url):
    writer = RemoteTier(valkey_url, layout_of(block_tokens=8))
    big = block_keys(IDENTITY, PROMPT, 8)
    assert writer.store(0, big, [numbered_row(writer, 0, n) for n in range(len(big))]).all()
    assert writer.flush(20)
    writer.close()
    client, names = open_client(valkey_url)[0], []
    tier = RemoteTier(client, layout_of(), options=RemoteOptions(budget=10.0))
    get = client.get
    client.get = lambda objects: names.extend(name for name, _ in objects) or get(objects)
    tier.expect(IDENTITY, PROMPT)
    memory = [np.empty(tier.layout.row_bytes(0), np.uint8) for _ in KEYS]
    assert tier.load(0, KEYS, memory)[: 2 * len(big)].all()
    assert len(names) == len(big)
    tier.close()
