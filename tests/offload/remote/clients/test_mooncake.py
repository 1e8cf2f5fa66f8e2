"""What is special about Mooncake: copies whose owner died, a master that forgets."""

import time

import pytest

from kvstow.offload.keys import block_keys
from kvstow.offload.remote.tier import RemoteTier
from kvstow.offload.remote.url import RemoteOptions, opened
from kvstow.testing.servers import Mooncake
from offloading import IDENTITY, numbered_row
from remote_stores import PROMPT, layout_of

pytestmark = pytest.mark.remote

KEYS = block_keys(IDENTITY, PROMPT, 4)
MASTER, OWNER = 0, 1


@pytest.fixture
def server(tmp_path):
    with Mooncake(tmp_path) as started:
        yield started


def tier_of(server):
    client, _ = opened(server.url + "&stage=16MiB")
    return RemoteTier(client, layout_of(), options=RemoteOptions(budget=10.0, load=20.0))


def rows_of(tier):
    return [numbered_row(tier, 0, n) for n in range(len(KEYS))]


def loaded(tier):
    """Which rows came; each of them is right."""
    rows = [row * 0 for row in rows_of(tier)]
    found = tier.load(0, KEYS, rows).tolist()
    for came, row, expected in zip(found, rows, rows_of(tier), strict=True):
        assert not came or (row == expected).all()
    return found


def eventually(tier, wanted, seconds=60):
    """Store and load again and again until all rows, or none, come back."""
    end = time.monotonic() + seconds
    while True:
        tier.writes.forget([tier._name(0, key) for key in KEYS])
        tier.store(0, KEYS, rows_of(tier))
        tier.flush(20)
        tier._look_ups.forget(0, KEYS)
        if loaded(tier) == [wanted] * len(KEYS):
            return
        assert time.monotonic() < end
        tier._published = float("-inf")
        time.sleep(0.5)


def test_a_put_onto_a_copy_whose_owner_died_is_a_miss_until_the_store_has_noticed(server):
    tier = tier_of(server)
    eventually(tier, True)
    server.kill(OWNER)
    tier._look_ups.forget(0, KEYS)
    assert loaded(tier) == [False] * len(KEYS)
    # The store answers puts of these keys with success now, onto the dead copy.
    tier.writes.forget([tier._name(0, key) for key in KEYS])
    tier.store(0, KEYS, rows_of(tier))
    assert tier.flush(20)
    assert loaded(tier) == [False] * len(KEYS)
    server.start()
    eventually(tier, True)
    tier.close()


def test_a_master_that_was_started_again_knows_no_rows_and_takes_new_ones(server):
    tier = tier_of(server)
    eventually(tier, True)
    server.kill(MASTER)
    tier._look_ups.forget(0, KEYS)
    assert loaded(tier) == [False] * len(KEYS)
    assert tier.breaker.is_open
    server.kill(OWNER)
    server.start()
    end = time.monotonic() + 60
    while tier.breaker.is_open:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert loaded(tier) == [False] * len(KEYS)
    eventually(tier, True)
    tier.close()
