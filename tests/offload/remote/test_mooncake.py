"""What is special about Mooncake: copies whose owner died, a master that forgets, no room."""

import time
from threading import Event, Thread

import numpy as np
import pytest

from kvstow.offload.keys import block_keys
from kvstow.offload.remote.client import NO_ROOM, Blob, RemoteOptions, open_client, whole_objects
from kvstow.offload.remote.tier import RemoteTier
from offloading import IDENTITY, numbered_row
from remote_stores import PROMPT, layout_of
from servers import Mooncake

pytestmark = pytest.mark.remote

KEYS = block_keys(IDENTITY, PROMPT, 4)
MASTER, OWNER = 0, 1


@pytest.fixture
def server(tmp_path):
    with Mooncake(tmp_path) as started:
        yield started


def tier_of(server, tenant="shared"):
    client, _ = open_client(server.url + "&stage=16MiB")
    options = RemoteOptions(budget=10.0, load=20.0, tenant=tenant)
    return RemoteTier(client, layout_of(), options=options)


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


def test_objects_that_somebody_else_is_making_are_missing_or_whole(server):
    """Ranks of one engine look for the same objects while others make them."""
    first, second = (open_client(server.url + "&stage=16MiB")[0] for _ in range(2))
    data = np.arange(1 << 16).view(np.uint8)
    over, seen, errors = Event(), set(), []
    now = [0]

    def look():
        try:
            while not over.is_set():
                names = [f"race {n}" for n in range(now[0], now[0] + 4)]
                second.exists(names)
                for blob in whole_objects(second, names, data.nbytes):
                    seen.add(blob is not None)
                    assert blob is None or (blob == data).all()
                parts = second.get([(name, [(0, 8), (64, 128)]) for name in names])
                for found in parts:
                    assert found is None or (np.concatenate(found)[8:] == data[64:128]).all()
                assert second.put([Blob(names[1], data)]) == {}
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=look)
    thread.start()
    for now[0] in range(150):
        assert first.put([Blob(f"race {now[0] + 1}", data)]) == {}
    over.set()
    thread.join()
    assert not errors, errors
    assert seen == {False, True}
    for client in (first, second):
        client.close()


def test_bytes_that_were_read_stay_as_they_are_while_more_is_read(server):
    client, _ = open_client(server.url + "&stage=16MiB")
    rows = [np.full(3 << 20, n, np.uint8) for n in range(12)]
    blobs = [Blob(f"row {n}", row) for n, row in enumerate(rows)]
    assert client.put([*blobs, Blob("large", np.full(3 << 20, 99, np.uint8))]) == {}
    kept = [whole_objects(client, [blob.name], 3 << 20)[0][7:] for blob in blobs]
    for _ in range(8):  # memory that is let go of is used again
        assert (whole_objects(client, ["large"], 3 << 20)[0] == 99).all()
        (parts,) = client.get([("large", [(0, 1 << 20)])])
        assert (parts[0] == 99).all()
    for n, row in enumerate(kept):
        assert (row == n).all()
    client.close()


def fill(client):
    """Make objects until not even a small one fits; what was made is promised to a reader."""
    for nbytes in (4 << 20, 256 << 10, 16 << 10, 1 << 10, 256):
        for n in range(1000):
            blob = Blob(f"{nbytes} {n}", np.zeros(nbytes, np.uint8))
            refused = client.put([blob])
            if refused:
                assert refused == {blob.name: NO_ROOM}
                assert not client.exists([blob.name]).any()
                break
            assert client.exists([blob.name]).all()
        else:
            raise AssertionError("the store takes more than it has room for")


def test_rows_that_a_full_store_refuses_are_counted_and_never_called_stored(tmp_path):
    with Mooncake(tmp_path, "64 MB", "--default_kv_lease_ttl=3600000") as server:
        tier = tier_of(server)
        tier.store(0, KEYS[:2], rows_of(tier)[:2])
        assert tier.flush(20)
        assert tier.counts.stored_rows == 2
        assert tier.contains(0, KEYS).tolist() == [True] * 2 + [False] * 4
        fill(tier.client)
        tier.store(0, KEYS, rows_of(tier))
        assert tier.flush(20)
        assert tier.counts.stored_rows == 2
        assert tier.writes.dropped.now == {NO_ROOM: 4}
        assert not tier.breaker.is_open  # it answers: what it has is still read
        assert loaded(tier) == [True] * 2 + [False] * 4
        stranger = tier_of(server, tenant="stranger")  # not even its manifest fits
        stranger.store(0, KEYS, rows_of(stranger))
        assert stranger.flush(20)
        assert stranger.counts.stored_rows == 0
        assert stranger.writes.dropped.now == {NO_ROOM: 6}
        for one in (tier, stranger):
            one.close()
