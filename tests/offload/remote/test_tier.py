"""Stores that are dead, slow, stopped, started again or full of something else."""

from collections import Counter
from threading import Event, Thread
from time import sleep

import numpy as np
import pytest

from kvstow.observe import Telemetry
from kvstow.offload.keys import block_keys
from kvstow.offload.metrics import TierMetrics
from kvstow.offload.remote.calls import LEAST_FAILURES, WINDOW_CALLS, Breaker
from kvstow.offload.remote.client import NO_ROOM, Blob, RemoteOptions, open_client, whole_objects
from kvstow.offload.remote.directory import WriterLayout
from kvstow.offload.remote.objects import RowObjects
from kvstow.offload.remote.tier import RemoteTier
from kvstow.offload.store import Store
from offloading import IDENTITY, numbered_row
from remote_stores import PROMPT, TOKENS, blocks_of, check, filled, layout_of
from servers import Mooncake, Seaweed, Valkey
from waiting import wait_for

KEYS = block_keys(IDENTITY, PROMPT, 4)


class Watched:
    """A client that counts names by verb, and keeps calls waiting while a gate is shut."""

    def __init__(self, url):
        self.client, _ = open_client(url)
        self.where, self.puts_at_once = self.client.where, self.client.puts_at_once
        self.asked = Counter()
        self.gates = {}
        self.broken = ""

    def __getattr__(self, verb):
        method = getattr(self.client, verb)

        def call(*arguments):
            self.asked[verb] += len(arguments[0]) if arguments else 1
            if verb == self.broken:
                raise LookupError("unforeseen")
            gate = self.gates.get(verb)
            if gate is not None:
                assert gate.wait(60)
            return method(*arguments)

        return call


def tier_of(store, layout=None, **options):
    options = RemoteOptions(**({"budget": 10.0} | options))
    return RemoteTier(store, layout or layout_of(), options=options)


def stored(tier, numbers=range(6), group=0):
    """Rows that are functions of their numbers, under the prompt's keys."""
    rows = [numbered_row(tier, group, n) for n in numbers]
    assert tier.store(group, [KEYS[n] for n in numbers], rows).all()
    assert tier.flush(20)


def loaded(tier, numbers=range(6), group=0):
    """Which rows came; those that did are right, and the others' memory is as it was."""
    rows = [np.full(tier.layout.row_bytes(group), 0xA5, np.uint8) for _ in numbers]
    found = tier.load(group, [KEYS[n] for n in numbers], rows).tolist()
    for n, row, came in zip(numbers, rows, found, strict=True):
        assert (row == (numbered_row(tier, group, n) if came else 0xA5)).all()
    return found


# ── errors of kinds that nobody foresaw ───────────────────────────────────────────────


def test_threads_live_on_after_an_error_that_nobody_foresaw(valkey_url):
    watched = Watched(valkey_url)
    tier = tier_of(watched)
    stored(tier, range(3))
    for verb in ("put", "get", "exists"):
        good, watched.broken = watched.broken, verb
        assert not any(loaded(tier, range(3))) or verb == "put"
        tier.store(0, [KEYS[4]], [numbered_row(tier, 0, 4)])
        assert tier.flush(20)
        watched.broken = good
        wait_for(lambda: not tier.breaker.is_open)
    stored(tier, [4])
    assert all(loaded(tier, [0, 1, 2, 4]))
    assert tier.writes.dropped.now["failed"] >= 1
    tier.close()


def test_a_row_that_could_not_be_copied_is_not_waited_for(valkey_url, monkeypatch):
    tier = tier_of(valkey_url)
    keys, rows = KEYS[:3], [numbered_row(tier, 0, n) for n in range(3)]
    made = []
    true = RowObjects.written

    def fails(*arguments):
        made.append(arguments)
        if len(made) == 2:
            raise MemoryError("on purpose")
        return true(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RowObjects, "written", fails)
        with pytest.raises(MemoryError):
            tier.store(0, keys, rows)
    assert tier.flush(10)
    assert tier.counts.stored_rows == 1
    assert tier.store(0, keys, rows).all()
    assert tier.flush(10)
    assert loaded(tier, range(3)) == [True] * 3
    tier.close()


def test_rows_that_are_asked_for_again_and_again_are_looked_for_again(valkey_url, monkeypatch):
    monkeypatch.setattr("kvstow.offload.remote.fetch.FOUND_SECONDS", 0.5)
    tier, other = tier_of(valkey_url), tier_of(valkey_url)
    stored(tier, range(3))
    other.refresh()
    assert other.contains(0, KEYS[:3]).all()
    assert tier.evict(0, KEYS[:3]) == 3
    for _ in range(4):
        sleep(0.2)
        found = other.contains(0, KEYS[:3])
    assert not found.any()
    tier.close()
    other.close()


def test_a_thread_that_ends_shows_in_metrics_and_the_tier_serves_on(valkey_url, monkeypatch):
    monkeypatch.setattr("kvstow.offload.remote.tier.REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(RemoteTier, "_keep_looking", lambda self: {}["unforeseen"])
    tier, telemetry = tier_of(valkey_url), Telemetry()
    TierMetrics(telemetry.registry, [tier])
    wait_for(lambda: tier.counts.failures)
    assert b'kvstow_tier_failures_total{tier="remote"} 1.0' in telemetry.exposition()
    assert b'kvstow_broken_threads{thread="kvstow-remote-look"}' in telemetry.exposition()
    stored(tier)
    assert loaded(tier) == [True] * 6
    tier.close()


# ── dead and slow ─────────────────────────────────────────────────────────────────────


def test_a_store_that_is_dead_from_the_start_is_misses_and_dropped_rows(tmp_path):
    url = f"{Valkey(tmp_path).url}?budget=0.5&load=1"
    arena, blocks = filled(layout_of())
    with Store(host="1MiB", remote=url) as store:
        assert store.save(arena, blocks, PROMPT) > 0
        assert store.stored_tokens(PROMPT) == TOKENS  # host memory has it
        store.flush(20)  # until then rows are being read, and not evicted
        store.host.evict(0, KEYS)
        assert store.stored_tokens(PROMPT) == 0
        wait_for(lambda: store.remote.breaker.is_open)
        assert set(store.remote.writes.dropped.now) == {"unreachable"}


def test_a_dead_store_is_asked_a_few_times_and_then_left_alone(tmp_path):
    with Valkey(tmp_path) as server:
        client = Watched(server.url)
        tier = tier_of(client, load=2.0)
        stored(tier)
        server.kill()
        tier._look_ups.forget(0, KEYS)
        assert loaded(tier) == [False] * 6
        assert tier.misses.now == {"unreachable": 6}
        wait_for(lambda: tier.breaker.is_open)
        assert not tier.contains(0, KEYS).any()
        assert tier.misses.now == {"unreachable": 12}
        gets, probes = client.asked["get"], client.asked["exists"]
        for _ in range(100):
            assert not tier.contains(0, KEYS).any()
            assert loaded(tier) == [False] * 6
            assert not tier.store(0, [b"new"], [numbered_row(tier, 0, 9)]).any()
        assert client.asked["get"] == gets
        assert client.asked["exists"] - probes <= 4  # probes, on nobody's time
        assert tier.misses.now["unreachable"] >= 600
        server.start()
        wait_for(lambda: not tier.breaker.is_open)
        assert loaded(tier) == [True] * 6
        tier.close()


@pytest.mark.parametrize("kind", [Valkey, pytest.param(Seaweed, marks=pytest.mark.remote)])
def test_a_store_that_hangs_costs_a_budget_and_comes_back(tmp_path, kind):
    with kind(tmp_path) as server:
        tier = tier_of(open_client(server.url)[0], budget=5.0, load=5.0)
        stored(tier)
        assert loaded(tier) == [True] * 6
        tier._look_ups.forget(0, KEYS)
        tier.options = RemoteOptions(budget=0.2, load=0.2)
        server.stop()
        try:
            for _ in range(WINDOW_CALLS // 2):
                assert not tier.contains(0, KEYS).any()
            assert tier.breaker.is_open
            assert tier.misses.now == {"unreachable": 6 * WINDOW_CALLS // 2}
            assert loaded(tier) == [False] * 6
        finally:
            server.go_on()
        tier.options = RemoteOptions(budget=5.0, load=5.0)
        wait_for(lambda: not tier.breaker.is_open)
        assert loaded(tier) == [True] * 6
        tier.close()


def test_one_slow_look_up_drops_no_writes(valkey_url):
    """It kept every row from the store for half a second."""
    client = Watched(valkey_url)
    tier = tier_of(client)
    stored(tier, range(2))
    tier._look_ups.forget(0, KEYS)
    tier.options = RemoteOptions(budget=0.05)
    client.gates["exists"] = Event()
    assert not tier.contains(0, KEYS).any()
    assert not tier.breaker.is_open
    taken = tier.store(0, KEYS[2:4], [numbered_row(tier, 0, n) for n in (2, 3)])
    client.gates["exists"].set()
    assert taken.all()
    assert tier.flush(20)
    assert tier.writes.dropped.now == {}
    tier.options = RemoteOptions(budget=10.0)
    assert loaded(tier) == [True] * 4 + [False] * 2
    assert tier.breaker.times_opened == 0
    tier.close()


def test_a_breaker_opens_when_most_calls_fail_and_closes_with_the_first_answer():
    slow_now_and_then, dead = Breaker("a store"), Breaker("another")
    for _ in range(20):
        for _ in range(3):
            slow_now_and_then.succeeded()
        slow_now_and_then.failed("slow")
    assert not slow_now_and_then.is_open
    for _ in range(LEAST_FAILURES):
        assert not dead.is_open
        dead.failed("refused")
    assert dead.is_open
    dead.close()
    assert not dead.is_open
    assert dead.times_opened == 1


def test_one_failure_has_the_store_asked_on_nobodys_time_until_it_answers(valkey_url):
    client = Watched(valkey_url)
    tier = tier_of(client)
    client.broken = "exists"
    tier.breaker.failed("refused")
    wait_for(lambda: tier.breaker.is_open)  # by the tier's own questions
    client.broken = ""
    wait_for(lambda: not tier.breaker.is_open)
    assert tier.breaker.times_opened == 1
    stored(tier)
    tier.close()


def test_an_answer_that_comes_too_late_touches_nothing(valkey_url):
    client = Watched(valkey_url)
    tier = tier_of(client, load=0.2)
    stored(tier)
    client.gates["get"] = Event()
    rows = [np.full(tier.layout.row_bytes(0), 0xA5, np.uint8) for _ in KEYS]
    assert not tier.load(0, KEYS, rows).any()
    client.gates["get"].set()
    wait_for(lambda: not tier.breaker.is_open)
    assert all((row == 0xA5).all() for row in rows)
    tier.options = RemoteOptions(load=10.0, budget=10.0)
    assert loaded(tier) == [True] * 6
    tier.close()


@pytest.mark.parametrize(
    "kind",
    [
        Valkey,
        pytest.param(Seaweed, marks=pytest.mark.remote),
        pytest.param(Mooncake, marks=pytest.mark.remote),
    ],
)
def test_rows_are_right_or_missing_while_a_server_is_killed_and_started(tmp_path, kind):
    with kind(tmp_path) as server:
        writer, reader = (tier_of(open_client(server.url)[0], load=2.0) for _ in range(2))
        stored(writer)
        reader.refresh()
        over, results, errors = Event(), Counter(), []

        def read():
            try:
                while not over.is_set():
                    reader._look_ups.forget(0, KEYS)
                    results.update(loaded(reader))
                    writer.writes.forget([writer._name(0, key) for key in KEYS])
                    writer.store(0, KEYS, [numbered_row(writer, 0, n) for n in range(6)])
            except BaseException as error:
                errors.append(error)

        thread = Thread(target=read)
        thread.start()
        for _ in range(2):
            came = results[True]
            wait_for(lambda came=came: results[True] > came or errors)
            server.kill()
            lost = results[False]
            wait_for(lambda lost=lost: results[False] > lost or errors)
            server.start()
        came = results[True]
        wait_for(lambda: results[True] > came + 6 or errors)
        over.set()
        thread.join()
        assert not errors
        for tier in (writer, reader):
            tier.close()


# ── load ──────────────────────────────────────────────────────────────────────────────


def test_writes_never_wait_and_what_does_not_fit_is_dropped_and_counted(valkey_url):
    client = Watched(valkey_url)
    tier = tier_of(client, queue=3 * 2048)
    client.gates["put"] = Event()
    taken = tier.store(0, KEYS, [numbered_row(tier, 0, n) for n in range(6)])
    assert 0 < taken.sum() < 6
    assert tier.writes.dropped.now == {"queue full": int(6 - taken.sum())}
    assert tier.store(0, KEYS[:1], [numbered_row(tier, 0, 0)]).all()  # on its way already
    client.gates["put"].set()
    assert tier.flush(20)
    assert tier.counts.stored_rows == taken.sum()
    assert loaded(tier) == taken.tolist()
    tier.close()


def test_a_row_that_s3_takes_long_to_store_holds_up_no_others(s3_url):
    client = Watched(s3_url)
    tier = tier_of(client)
    stored(tier, [0])
    client.gates["put"] = Event()
    before = client.asked["put"]
    for n in range(1, 6):
        assert tier.store(0, [KEYS[n]], [numbered_row(tier, 0, n)]).all()
        wait_for(lambda n=n: client.asked["put"] == before + n)
    client.gates["put"].set()
    assert tier.flush(20)
    assert loaded(tier) == [True] * 6
    tier.close()


def test_rows_that_a_full_store_refuses_are_counted_and_the_others_are_read(tmp_path, caplog):
    with Valkey(tmp_path) as server:
        tier, stranger = (
            tier_of(open_client(server.url)[0], tenant=tenant) for tenant in ("known", "stranger")
        )
        stored(tier, range(2))
        tier.client._redis.config_set("maxmemory", "1")  # nothing fits any more
        for one in (tier, stranger):
            one.store(0, KEYS, [numbered_row(one, 0, n) for n in range(6)])
            assert one.flush(20)
        assert tier.counts.stored_rows == 2
        assert tier.writes.dropped.now == {NO_ROOM: 4}
        assert "rows are not written: no room for" in caplog.text
        assert stranger.counts.stored_rows == 0
        assert stranger.writes.dropped.now == {NO_ROOM: 6}
        assert not tier.breaker.is_open
        assert loaded(tier) == [True] * 2 + [False] * 4
        tier.client._redis.config_set("maxmemory", "0")
        stored(tier)
        assert loaded(tier) == [True] * 6
        for one in (tier, stranger):
            one.close()


def test_a_row_that_is_there_is_not_sent_again(url):
    first, second = Watched(url), Watched(url)
    for client in (first, second):
        tier = tier_of(client)
        stored(tier)
        stored(tier)
        tier.close()
    assert first.asked["put"] == 6 + 2  # rows, manifest, entry
    assert second.asked["put"] == 1  # the manifest is offered again, and not taken


def test_a_look_up_loads_nothing_and_a_load_after_it_asks_for_nothing_twice(valkey_url):
    writer = tier_of(valkey_url)
    stored(writer)
    client = Watched(valkey_url)
    tier = tier_of(client)
    client.asked.clear()
    assert tier.contains(0, KEYS).all()
    assert client.asked == {"exists": 6}
    assert loaded(tier) == [True] * 6
    assert client.asked == {"exists": 6, "get": 6}
    for one in (writer, tier):
        one.close()


def test_a_load_from_two_deployments_looks_for_all_rows(valkey_url):
    writers = [tier_of(valkey_url, layout_of(tp=(rank, 2))) for rank in range(2)]
    writers.append(tier_of(valkey_url))
    for writer in writers[:2]:
        stored(writer, [0])  # any bytes: none of them is read
    stored(writers[2], [1, 2])
    client = Watched(valkey_url)
    tier = tier_of(client)
    client.asked.clear()
    assert tier.contains(0, KEYS).tolist() == [True, True, True, False, False, False]
    tier._look_ups.forget(0, KEYS)
    client.asked.clear()
    assert loaded(tier, [1, 2, 3]) == [True, True, False]
    assert client.asked == {"exists": 9, "get": 2}  # per row one object, or one of each rank
    for one in (*writers, tier):
        one.close()


def test_a_prompt_that_nobody_stored_costs_one_question_about_its_first_blocks(valkey_url):
    writer = tier_of(valkey_url)
    stored(writer)
    client = Watched(valkey_url)
    tier = tier_of(client)
    client.asked.clear()
    strange = [bytes([n % 256, n // 256]) for n in range(2000)]
    assert not tier.contains(0, strange).any()
    assert client.asked["exists"] == 32
    for one in (writer, tier):
        one.close()


# ── wrong objects ─────────────────────────────────────────────────────────────────────


def damage(client, tier, n, change):
    """Change a row object behind everybody's back."""
    name = tier._name(0, KEYS[n])
    blob = whole_objects(client, [name], 1 << 20)[0].copy()
    client.delete([name])
    client.put([Blob(name, change(blob))])


def flipped(blob):
    blob[-5] ^= 1
    return blob


def newer(blob):
    blob[8] = 99
    return blob


def test_wrong_objects_are_misses_with_a_reason_and_are_written_again(url):
    client, _ = open_client(url)
    tier = tier_of(url)
    stored(tier)
    damage(client, tier, 0, flipped)
    damage(client, tier, 1, lambda blob: blob[:-100])
    damage(client, tier, 2, lambda blob: np.frombuffer(b"something else", np.uint8))
    other = whole_objects(client, [tier._name(0, KEYS[4])], 1 << 20)[0]
    damage(client, tier, 3, lambda blob: other)
    damage(client, tier, 4, newer)
    assert loaded(tier) == [False] * 5 + [True]
    assert tier.misses.now == {"damaged": 1, "foreign": 2, "truncated": 1, "version": 1}
    names = [tier._name(0, key) for key in KEYS]
    wait_for(lambda: client.exists(names).tolist() == [False] * 4 + [True] * 2)
    stored(tier, range(4))
    assert loaded(tier) == [True] * 4 + [False, True]
    tier.close()
    client.close()


def test_wrong_objects_are_misses_to_other_layouts_too(url):
    arena, blocks = filled(layout_of())
    with Store(remote=url) as store:
        store.save(arena, blocks, PROMPT)
        store.flush(20)
        client, _ = open_client(url)
        damage(client, store.remote, 0, lambda blob: blob[:-100])
        damage(client, store.remote, 1, newer)
    layout = layout_of(tp=(1, 2), order="BHLNC")
    with Store(remote=url) as store:
        store.bind(layout)
        tier = store.remote
        rows = [np.full(tier.layout.row_bytes(0), 0xA5, np.uint8) for _ in KEYS]
        telemetry = Telemetry()
        store.watch(telemetry)
        assert tier.load(0, KEYS, rows).tolist() == [False, False, True, True, True, True]
        text = telemetry.exposition().decode()
        assert 'kvstow_tier_missed_rows_total{reason="truncated",tier="remote"} 1.0' in text
        assert 'kvstow_tier_missed_rows_total{reason="version",tier="remote"} 1.0' in text
        assert all((row == 0xA5).all() for row in rows[:2])
        assert tier.misses.now == {"truncated": 1, "version": 1}
    client.close()


@pytest.mark.parametrize("change", [flipped, lambda data: data[:-1], lambda data: data[:0]])
def test_a_manifest_that_is_not_what_its_name_says_is_not_used_and_others_are(valkey_url, change):
    tier, other = tier_of(valkey_url), tier_of(valkey_url, layout_of(order="BLNHC"))
    stored(tier)
    other._publish()
    client, _ = open_client(valkey_url)
    writer = WriterLayout.of(layout_of())
    name = f"{tier._directory.base}/manifest/{writer.fingerprint}"
    data = whole_objects(client, [name], 1 << 20)[0].copy()
    client.delete([name])
    client.put([Blob(name, change(data))])
    reader = tier_of(valkey_url, layout_of(order="BHLNC"))
    assert not reader.contains(0, KEYS).any()
    assert [each.fingerprint for each in reader._directory.layouts] == [other._own.fingerprint]
    for one in (tier, other, reader, client):
        one.close()


def test_a_lost_directory_is_written_again(valkey_url):
    tier = tier_of(valkey_url)
    stored(tier, range(3))
    client, _ = open_client(valkey_url)
    client.delete([f"{tier._directory.base}/layout/000"])
    reader = tier_of(valkey_url)
    assert not reader.contains(0, KEYS).any()
    tier._published = float("-inf")  # as after some seconds
    stored(tier, range(3, 6))
    reader.refresh()
    assert loaded(reader) == [True] * 6
    for one in (tier, reader, client):
        one.close()


def test_many_writers_find_an_entry_each(valkey_url):
    layouts = [
        layout_of(order=order, block_tokens=size)
        for size in (2, 3, 4, 6, 8, 12)
        for order in ("BLHNC", "BHLNC", "BLNHC")
    ]
    tiers = [tier_of(valkey_url, layout) for layout in layouts]
    threads = [Thread(target=tier._publish) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = tier_of(valkey_url)
    found = {each.fingerprint for each in reader._directory.layouts}
    assert found == {WriterLayout.of(layout).fingerprint for layout in layouts}
    for tier in (*tiers, reader):
        tier.close()


def test_closing_writes_what_waits(valkey_url):
    arena, blocks = filled(layout_of())
    with Store(host="1MiB", remote=valkey_url) as store:
        store.save(arena, blocks, PROMPT)
    with Store(host="1MiB", remote=valkey_url) as store:
        layout = layout_of()
        assert store.bind(layout).stored_tokens(PROMPT) == TOKENS
        mine = blocks_of(layout, TOKENS)
        assert store.load(arena, PROMPT, into=mine) == TOKENS
        check(arena, mine)
        assert store.host.usage.rows > 0  # promoted
