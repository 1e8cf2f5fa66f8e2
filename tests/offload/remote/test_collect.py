"""Limits: what the collector removes, what it leaves, and what writers are refused."""

import logging
import time
from dataclasses import replace
from threading import Event, Thread

import numpy as np
import pytest

from kvstow.errors import StoreError
from kvstow.offload.keys import block_keys
from kvstow.offload.remote import collect as collecting
from kvstow.offload.remote.client import Blob, RemoteOptions, open_client
from kvstow.offload.remote.collect import USAGE, collect, last_usage, rows_in
from kvstow.offload.remote.directory import WriterLayout
from kvstow.offload.remote.tier import RemoteTier
from offloading import IDENTITY, numbered_row
from remote_stores import PROMPT, layout_of

KEYS = block_keys(IDENTITY, PROMPT, 2)
LATER = 3600.0


@pytest.fixture
def url(listing_url):
    """Mooncake cannot list its objects."""
    return listing_url


def later():
    return time.time() + LATER


def tier_of(url, tenant="shared", **options):
    client, _ = open_client(url)
    options = RemoteOptions(budget=10.0, tenant=tenant, **options)
    return RemoteTier(client, layout_of(block_tokens=2), options=options)


def stored(tier, numbers):
    tier.store(0, [KEYS[n] for n in numbers], [numbered_row(tier, 0, n) for n in numbers])
    assert tier.flush(20)


def loaded(tier, numbers):
    rows = [np.zeros(tier.layout.row_bytes(0), np.uint8) for _ in numbers]
    tier._look_ups.forget(0, KEYS)
    found = tier.load(0, [KEYS[n] for n in numbers], rows)
    for n, row, came in zip(numbers, rows, found.tolist(), strict=True):
        assert not came or (row == numbered_row(tier, 0, n)).all()
    return int(found.sum())


def test_rows_go_by_age_and_size_and_manifests_stay(url):
    tier = tier_of(url)
    stored(tier, range(8))
    client, nbytes = tier.client, tier._own.objects(0).nbytes
    assert collect(client, most=4 * nbytes).rows == 0  # all of them are young
    done = collect(client, most=5 * nbytes, clock=later)
    assert (done.rows, done.nbytes, done.left.nbytes) == (3, 3 * nbytes, 5 * nbytes)
    assert loaded(tier, range(8)) == 5
    assert last_usage(client).nbytes == 5 * nbytes
    assert collect(client, older_than=LATER - 600, clock=later).rows == 5
    assert loaded(tier, range(8)) == 0
    stored(tier, range(8))
    other = tier_of(url)  # finds the writer, whose manifest was not collected
    assert loaded(other, range(8)) == 8
    for one in (tier, other):
        one.close()


class ClockBehind:
    """A store by whose clock everything happens months earlier than by ours."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        return getattr(self._client, name)

    def list_blobs(self, prefix):
        for found in self._client.list_blobs(prefix):
            yield replace(found, modified=found.modified - 1e7)


def test_a_collector_whose_clock_is_ahead_removes_no_young_row(url):
    tier = tier_of(url)
    stored(tier, range(4))
    assert collect(ClockBehind(tier.client), older_than=3600, most=0).rows == 0
    assert loaded(tier, range(4)) == 4
    tier.close()


def test_a_tenant_above_its_limit_loses_its_own_rows_only(valkey_url):
    large, small = tier_of(valkey_url, "large"), tier_of(valkey_url, "small")
    stored(small, range(2))
    stored(large, range(6))
    nbytes = large._own.objects(0).nbytes
    done = collect(large.client, most_by_tenant=3 * nbytes, clock=later)
    assert done.rows == 3
    assert done.left.tenants == {"large": 3 * nbytes, "small": 2 * nbytes}
    assert loaded(small, range(2)) == 2
    assert loaded(large, range(6)) == 3
    for one in (large, small):
        one.close()


@pytest.mark.parametrize("what", ["tenant_bytes", "max_bytes"])
def test_a_writer_above_a_limit_is_refused_with_the_numbers(url, caplog, what):
    nbytes = WriterLayout.of(layout_of(block_tokens=2)).objects(0).nbytes
    tier = tier_of(url, **{what: 4 * nbytes})
    with caplog.at_level(logging.WARNING, "kvstow.offload"):
        for n in range(6):
            stored(tier, [n])
    assert tier.writes.dropped.now == {"quota": 2}
    who = "tenant 'shared'" if what == "tenant_bytes" else "the store"
    assert f"{who} has {4 * nbytes:,} of {4 * nbytes:,} bytes, {nbytes:,} more" in caplog.text
    collect(tier.client, most=nbytes, clock=later)
    tier.refresh()  # the collector's count says that there is room again
    stored(tier, [4, 5])
    assert loaded(tier, [4, 5]) == 2
    tier.close()


def test_rows_that_wait_to_be_written_count_against_a_limit(valkey_url):
    nbytes = WriterLayout.of(layout_of(block_tokens=2)).objects(0).nbytes
    tier = tier_of(valkey_url, tenant_bytes=4 * nbytes)
    taken = tier.store(0, KEYS[:8], [numbered_row(tier, 0, n) for n in range(8)])
    assert tier.flush(20)
    assert (taken.sum(), tier.counts.stored_rows) == (4, 4)
    assert tier.writes.dropped.now == {"quota": 4}
    assert sum(row.facts.nbytes for row in rows_in(tier.client)) == 4 * nbytes
    tier.close()


def test_a_new_writer_learns_from_the_collector_how_full_a_store_is(valkey_url):
    first = tier_of(valkey_url)
    stored(first, range(6))
    collect(first.client)
    second = tier_of(valkey_url, max_bytes=6 * first._own.objects(0).nbytes)
    stored(second, [7])
    assert second.writes.dropped.now == {"quota": 1}
    for one in (first, second):
        one.close()


def test_a_collector_whose_clock_was_ahead_is_forgotten_at_the_next_count(valkey_url):
    tier = tier_of(
        valkey_url, max_bytes=6 * WriterLayout.of(layout_of(block_tokens=2)).objects(0).nbytes
    )
    stored(tier, range(6))
    collect(tier.client, clock=lambda: later() + 1e9)
    tier.refresh()
    tier.evict(0, KEYS[:6])
    collect(tier.client)
    tier.refresh()
    stored(tier, [7])
    assert tier.writes.dropped.now == {}
    tier.close()


def test_a_collector_beside_writers_and_readers_never_makes_a_wrong_row(valkey_url, monkeypatch):
    monkeypatch.setattr(collecting, "YOUNG_SECONDS", 0.0)
    writer, reader = tier_of(valkey_url), tier_of(valkey_url)
    over, errors, rounds = Event(), [], 0
    nbytes = writer._own.objects(0).nbytes

    def collected():
        client, _ = open_client(valkey_url)
        try:
            while not over.is_set():
                collect(client, most=2 * nbytes, clock=lambda: time.time() + 60)
        except BaseException as error:
            errors.append(error)
        client.close()

    threads = [Thread(target=collected) for _ in range(2)]
    for thread in threads:
        thread.start()
    came = 0
    while (came < 50 or rounds < 50) and rounds < 2000:
        rounds += 1
        writer.writes.forget([writer._name(0, key) for key in KEYS])
        stored(writer, range(8))
        reader.refresh()
        came += loaded(reader, range(8))  # compares what came
    over.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert came >= 50
    assert reader.misses.now.keys() <= {"absent"}
    for one in (writer, reader):
        one.close()


def test_objects_that_are_no_rows_are_neither_counted_nor_removed(url):
    tier = tier_of(url)
    stored(tier, range(2))
    tier.client.put([Blob("rows1/shared/notes", np.frombuffer(b"mine", np.uint8))])
    assert {row.tenant for row in rows_in(tier.client)} == {"shared"}
    assert collect(tier.client, most=0, clock=later).rows == 2
    assert tier.client.exists(["rows1/shared/notes"]).all()
    tier.close()


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"time": 1, "more": 2}', b"\xff"])
def test_a_count_that_cannot_be_read_is_no_count(valkey_url, data):
    client, _ = open_client(valkey_url)
    client.put([Blob(USAGE, np.frombuffer(data, np.uint8))])
    assert last_usage(client) is None
    client.close()


@pytest.mark.remote
def test_a_store_that_cannot_list_says_so(mooncake_url):
    client, _ = open_client(mooncake_url)
    with pytest.raises(StoreError, match="Mooncake evicts by itself"):
        collect(client)
    client.close()
