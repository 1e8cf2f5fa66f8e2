"""Damage that must not last: broken indexes, missing descriptors, leases that nobody ends."""

import errno
import fcntl
import os
import resource
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from kvstow.errors import StoreError
from kvstow.offload.disk import opening
from kvstow.offload.disk.files import Files
from kvstow.offload.disk.format import decode_header
from kvstow.offload.disk.index import IndexBroken, Transaction
from kvstow.offload.disk.inspect import survey
from kvstow.offload.disk.segments import Segments
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.tier import Counts, Usage
from kvstow.testing.faulty import FaultyFiles
from offloading import hybrid, numbered_key, numbered_row
from waiting import wait_for

MIB = 1 << 20
ROWS = 200
KEYS = [numbered_key(n) for n in range(ROWS)]


def made(path, capacity=4 * MIB, **options):
    tier = DiskTier(path, hybrid(), capacity=capacity, **options)
    assert tier.store(0, KEYS, [numbered_row(tier, 0, n) for n in range(ROWS)]).all()
    return tier


def right_rows(tier):
    rows = [np.zeros(tier.layout.row_bytes(0), np.uint8) for _ in KEYS]
    mask = tier.load(0, KEYS, rows)
    assert all((rows[n] == numbered_row(tier, 0, n)).all() for n in np.flatnonzero(mask))
    return int(mask.sum())


def damage(path, table="rows_key"):
    """Zeros instead of one page of the index."""
    with sqlite3.connect(path / "index.db") as index:
        index.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = index.execute("PRAGMA page_size").fetchone()[0]
        roots = dict(index.execute("SELECT name, rootpage FROM sqlite_master"))
    index.close()
    with open(path / "index.db", "r+b") as file:
        file.seek((roots[table] - 1) * size)
        file.write(bytes(size))


# ── the index ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("table", ["rows_key", "rows", "slots", "segments", "rows_seq"])
def test_a_damaged_page_of_the_index_costs_no_row_for_long(tmp_path, table):
    made(tmp_path).close()
    damage(tmp_path, table)
    tier = DiskTier(tmp_path, hybrid())
    right_rows(tier)
    new = [numbered_key(n) for n in range(900, 910)]
    assert tier.store(0, new, [numbered_row(tier, 0, n) for n in range(900, 910)]).all()
    tier.close()
    tier = DiskTier(tmp_path)
    assert right_rows(tier) == ROWS
    assert tier.contains(0, new).all()
    assert not (tmp_path / "index.rebuild").exists()
    tier.close()


def test_an_index_that_breaks_under_two_processes_is_made_again_when_both_have_let_go(tmp_path):
    now = [0.0]
    first = made(tmp_path, clock=lambda: now[0])
    second = DiskTier(tmp_path, clock=lambda: now[0])
    damage(tmp_path)
    for tier in (first, second):  # SQLite keeps pages: a new connection sees the damage
        tier.index.ask("PRAGMA cache_size = 0")
    for _ in range(6):
        now[0] += 1.5
        for tier in (first, second):
            assert right_rows(tier) in range(ROWS + 1)
    assert right_rows(first) == right_rows(second) == ROWS
    row = numbered_row(first, 0, 777)
    assert first.store(0, [numbered_key(777)], [row]).all()
    assert second.contains(0, [numbered_key(777)]).all()
    first.close()
    second.close()


class MarkedMeanwhile(Files):
    """While rows are made durable, seconds pass and another process finds the index broken."""

    def __init__(self, path, now):
        self.path, self.now, self.is_armed = path, now, False

    def sync(self, fd):
        if self.is_armed:
            self.is_armed = False
            self.now[0] += 2
            (self.path / "index.rebuild").touch(mode=0o600)
        super().sync(fd)


def in_time(work):
    """The result of `work`, or a failed test where it hangs."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    return results[0]


def test_a_store_that_tells_its_figures_does_not_wait_for_itself(tmp_path):
    now = [0.0]
    files = MarkedMeanwhile(tmp_path, now)
    tier = made(tmp_path, files=files, threads=0, clock=lambda: now[0])
    files.is_armed = True
    new = [numbered_row(tier, 0, 900)]
    assert in_time(lambda: tier.store(0, [numbered_key(900)], new)).all()
    assert right_rows(tier) == ROWS  # the index is made again by then
    assert not (tmp_path / "index.rebuild").exists()
    tier.close()


def test_a_beat_does_not_wait_for_a_thread_that_found_the_index_broken(tmp_path):
    tier = made(tmp_path)
    found_broken = threading.Event()

    class Beside:
        name = "beside"
        counts = Counts()

        @property
        def usage(self):
            found_broken.set()
            wait_for(lambda: tier._attachment._gate._taken)
            return Usage(rows=0, nbytes=0, capacity=0)

    def break_index():
        with suppress(IndexBroken), tier._attachment.using():
            assert found_broken.wait(20)
            raise IndexBroken("on purpose")

    tier.publish(Beside())
    other = threading.Thread(target=break_index, daemon=True)
    other.start()
    in_time(tier.beat)
    other.join(20)
    assert right_rows(tier) == ROWS
    tier.close()


def test_two_threads_that_find_one_broken_index_make_it_again_once(tmp_path, monkeypatch):
    tier = made(tmp_path)
    attached, both = [], threading.Barrier(2)
    attach = tier._open.attach
    monkeypatch.setattr(tier._open, "attach", lambda **seconds: attached.append(attach(**seconds)))
    first_tries = [True, True]

    def work():
        if first_tries:
            first_tries.pop()
            both.wait(20)
            raise IndexBroken("on purpose")
        return tier.index.num_rows()

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(tier._attachment.retried(work)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [ROWS, ROWS]
    assert len(attached) == 1
    tier.close()


def test_the_lock_is_exclusive_until_a_broken_index_has_been_replaced(tmp_path, monkeypatch):
    made(tmp_path).close()
    (tmp_path / "index.db").write_bytes(b"no database at all" * 1000)
    free = []

    def probed(*args, **kwargs):
        other = os.open(tmp_path / "lock", os.O_RDWR)
        try:
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
            free.append(True)
        except BlockingIOError:
            free.append(False)
        finally:
            os.close(other)
        return recovered(*args, **kwargs)

    recovered = opening.recovered
    monkeypatch.setattr(opening, "recovered", probed)
    tier = DiskTier(tmp_path)
    assert right_rows(tier) == ROWS
    assert free == [False]
    tier.close()


def test_many_who_open_a_broken_store_at_once_all_get_it(tmp_path):
    made(tmp_path).close()
    (tmp_path / "index.db").write_bytes(b"no database at all" * 1000)
    found, errors = [], []

    def opened():
        try:
            tier = DiskTier(tmp_path)
            found.append(right_rows(tier))
            tier.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=opened) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, errors) == ([ROWS] * 5, [])


def test_the_index_is_not_mapped_into_memory(tmp_path):
    tier = made(tmp_path)
    assert tier.index.ask("PRAGMA mmap_size") == [(0,)]
    tier.close()


# ── other processes ───────────────────────────────────────────────────────────────────


def test_another_process_with_more_capacity_may_use_data_files_that_we_do_not_reach(tmp_path):
    small = DiskTier(tmp_path, hybrid(), capacity=MIB)
    large = DiskTier(tmp_path, capacity=8 * MIB)
    numbers = range(1500)
    keys = [numbered_key(n) for n in numbers]
    large.store(0, keys, [numbered_row(large, 0, n) for n in numbers])
    assert max(s for s, _, _ in large.index.segments()) >= MIB // large.segments.segment_bytes
    rows = [np.zeros(small.layout.row_bytes(0), np.uint8) for _ in keys]
    assert small.load(0, keys, rows).all()
    with small._pinned(0, small.index.find(0, keys)):
        more = [numbered_key(n) for n in range(2000, 2400)]
        small.store(0, more, [numbered_row(small, 0, n) for n in range(2000, 2400)])
    assert small.evict(0, keys) > 0
    small.close()
    large.close()


# ── what passes ───────────────────────────────────────────────────────────────────────


@contextmanager
def no_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 1, before[1]))
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        pass
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_moment_without_descriptors_drops_nothing(tmp_path):
    made(tmp_path).close()
    tier = DiskTier(tmp_path)
    assert tier.contains(0, KEYS).all()  # whatever SQLite needs is open
    with no_descriptors():
        with suppress(StoreError):
            assert right_rows(tier) == 0
        with pytest.raises(StoreError):
            DiskTier(tmp_path)
    assert right_rows(tier) == ROWS
    assert tier.index.ask("SELECT COUNT(*) FROM slots WHERE owner = -1") == [(0,)]
    tier.close()
    tier = DiskTier(tmp_path)
    assert (right_rows(tier), tier.dropped) == (ROWS, ())
    tier.close()


# ── leases ────────────────────────────────────────────────────────────────────────────


def test_a_directory_sync_that_failed_is_tried_again(tmp_path):
    class Names(FaultyFiles):
        fails = True
        synced = 0

        def sync_directory(self, path):
            if self.fails:
                raise OSError(5, "Input/output error")
            super().sync_directory(path)
            self.synced += 1

    files = Names()
    files.fails = False
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=files)
    files.fails = True
    files.synced = 0
    rows = [numbered_row(tier, 0, n) for n in range(10)]
    for _ in range(2):
        with pytest.raises(StoreError, match="Input/output error"):
            tier.store(0, KEYS[:10], rows)
        assert not tier.contains(0, KEYS).any()
        assert tier.index.ask("SELECT COUNT(*) FROM slots WHERE owner > 0") == [(0,)]
    files.fails = False
    assert tier.store(0, KEYS[:10], rows).all()
    assert files.synced == 1
    tier.close()


def test_the_name_of_a_data_file_is_durable_before_another_process_can_store_in_it(tmp_path):
    class Names(FaultyFiles):
        order: ClassVar[list[str]] = []

        def sync_directory(self, path):
            super().sync_directory(path)
            self.order.append("synced")

    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=Names())
    Names.order.clear()
    add = Transaction.add_segment

    def listed(self, *what):
        Names.order.append("listed")
        add(self, *what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transaction, "add_segment", listed)
        assert tier.store(0, KEYS[:1], [numbered_row(tier, 0, 0)]).all()
    assert Names.order == ["synced", "listed"]
    tier.close()


@pytest.mark.parametrize("where", ["finish", "start", "enter"])
def test_slots_are_given_back_when_a_store_ends_in_any_error(tmp_path, monkeypatch, where):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    rows = [numbered_row(tier, 0, n) for n in range(10)]

    def breaks(*args, **kwargs):
        raise RuntimeError("a bug")

    target = tier._writer if where == "enter" else tier.segments
    with monkeypatch.context() as patch:
        patch.setattr(target, f"_{where}" if where == "enter" else where, breaks)
        with pytest.raises(RuntimeError, match="a bug"):
            tier.store(0, KEYS[:10], rows)
    assert tier.index.ask("SELECT COUNT(*) FROM slots WHERE owner > 0") == [(0,)]
    assert tier.store(0, KEYS[:10], rows).all()
    tier.close()


def test_a_write_error_gives_back_the_slots_of_the_rows_that_were_not_written(
    tmp_path, monkeypatch
):
    """A slot whose row was entered may have been evicted and leased again by another thread."""
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, threads=0)
    given_back = set()
    release, finish = tier._writer._release, tier.segments.finish

    def noted(places):
        given_back.update(places)
        release(places)

    def half_written(writing):
        return [*finish(writing)[:5], *[OSError(errno.EIO, "on purpose")] * 5]

    monkeypatch.setattr(tier._writer, "_release", noted)
    monkeypatch.setattr(tier.segments, "finish", half_written)
    with pytest.raises(StoreError, match="5 of 10 rows were not written"):
        tier.store(0, KEYS[:10], [numbered_row(tier, 0, n) for n in range(10)])
    entered = {place for (place,) in tier.index.ask("SELECT place FROM rows")}
    assert len(entered) == len(given_back) == 5
    assert not entered & given_back
    assert tier.index.ask("SELECT COUNT(*) FROM slots WHERE owner > 0") == [(0,)]
    tier.close()


@pytest.mark.parametrize("files_are_lost", [False, True])
def test_rows_are_news_though_the_index_was_made_again(tmp_path, files_are_lost):
    tier = made(tmp_path, capacity=MIB)
    for _ in range(30):  # uses leave no record
        right_rows(tier)
        tier.beat()
    _, seen = tier.keys_since(0, 0)
    if files_are_lost:
        for file in tmp_path.glob("segment-*"):
            file.unlink()
    with suppress(IndexBroken), tier._attachment.using():
        raise IndexBroken("on purpose")
    tier.store(0, [b"new"], [numbered_row(tier, 0, 1)])
    keys, _ = tier.keys_since(0, seen)
    assert b"new" in keys
    tier.close()


def test_the_usage_is_told_while_another_process_keeps_the_index(tmp_path):
    tier = made(tmp_path)
    known = tier.usage
    other = sqlite3.connect(tmp_path / "index.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")  # and is stopped here
    new = numbered_row(tier, 0, 1)
    writer = threading.Thread(target=lambda: tier.store(0, [b"new"], [new]))
    ending = threading.Timer(6.0, lambda: other.execute("ROLLBACK"))
    writer.start()
    ending.start()
    time.sleep(0.2)
    assert tier.usage == known
    assert ending.is_alive()
    for thread in (ending, writer):
        thread.join()
    assert tier.usage.rows == known.rows + 1
    other.close()
    tier.close()


def test_evictions_are_counted_on_when_the_index_is_made_again(tmp_path):
    tier = made(tmp_path, capacity=MIB)
    numbers = range(1000, 1400)
    tier.store(0, [numbered_key(n) for n in numbers], [numbered_row(tier, 0, n) for n in numbers])
    evicted = tier.counts.evicted_rows
    assert evicted > 0
    with suppress(IndexBroken), tier._attachment.using():
        raise IndexBroken("on purpose")
    assert tier.counts.evicted_rows == evicted
    tier.close()


def test_a_read_that_ends_in_an_error_keeps_no_row_from_being_given_up(tmp_path, monkeypatch):
    tier = made(tmp_path)
    monkeypatch.setattr(tier.segments, "read", lambda group, wanted: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        right_rows(tier)
    monkeypatch.undo()
    assert not any(tier._busy())
    assert right_rows(tier) == ROWS
    tier.close()


def test_slots_that_could_not_be_given_back_are_given_back_later(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    rows = [numbered_row(tier, 0, n) for n in range(10)]
    true_write = tier.index.write
    calls = []

    def write(undone=None):
        calls.append(1)
        if len(calls) in (2, 3):  # to enter the rows, and to give their slots back
            raise StoreError("index: database or disk is full")
        return true_write(undone)

    with monkeypatch.context() as patch:
        patch.setattr(tier.index, "write", write)
        with pytest.raises(StoreError, match="disk is full"):
            tier.store(0, KEYS[:10], rows)
    assert tier.index.ask("SELECT COUNT(*) FROM slots WHERE owner > 0") == [(10,)]
    assert tier.store(0, KEYS[:10], rows).all()
    assert tier.index.ask("SELECT COUNT(*) FROM slots WHERE owner > 0") == [(0,)]
    tier.close()


def test_a_process_that_dies_while_it_rebuilds_leaves_a_store_that_is_rebuilt(tmp_path):
    made(tmp_path).close()
    damage(tmp_path)
    child = textwrap.dedent("""
        import os, sys
        from kvstow.offload.disk import recovery
        from kvstow.offload.disk.tier import DiskTier
        recovery._enter = lambda *args: os._exit(9)
        (open(sys.argv[1] + "/index.rebuild", "w")).close()
        os.chmod(sys.argv[1] + "/index.rebuild", 0o600)
        DiskTier(sys.argv[1])
    """)
    assert subprocess.run([sys.executable, "-c", child, str(tmp_path)]).returncode == 9
    tier = DiskTier(tmp_path)
    assert right_rows(tier) == ROWS
    tier.close()


def fail_records_of(monkeypatch, segment, number):
    true_records = Segments.records

    def records(self, which, group):
        if which == segment:
            raise OSError(number, os.strerror(number))
        return true_records(self, which, group)

    monkeypatch.setattr(Segments, "records", records)


def test_a_data_file_that_cannot_be_read_costs_its_own_rows_when_the_index_is_made_again(
    tmp_path, monkeypatch
):
    count = made_and_closed(tmp_path)
    (tmp_path / "index.db").unlink()
    with monkeypatch.context() as patch:
        fail_records_of(patch, 0, errno.EIO)
        tier = DiskTier(tmp_path)
    assert "segment-000000.kv cannot be read (Input/output error)" in str(tier.dropped)
    assert right_rows(tier) == ROWS - count
    tier.close()


def test_a_moment_without_descriptors_while_the_index_is_made_again_costs_nothing(
    tmp_path, monkeypatch
):
    made(tmp_path).close()
    (tmp_path / "index.db").unlink()
    with monkeypatch.context() as patch:
        fail_records_of(patch, 0, errno.EMFILE)
        with pytest.raises(StoreError, match="Too many open files"):
            DiskTier(tmp_path)
    tier = DiskTier(tmp_path)
    assert right_rows(tier) == ROWS
    tier.close()


# ── what a data file says of itself ───────────────────────────────────────────────────


def data_file(path):
    return min(path.glob("segment-*.kv"))


def made_and_closed(path):
    """How many rows lie in the first data file."""
    tier = made(path)
    (count,) = tier.index.ask("SELECT COUNT(*) FROM rows WHERE place < 1 << 24")[0]
    tier.close()
    assert 3 < count < ROWS
    return count


def test_a_data_file_of_another_layout_is_refused_by_name(tmp_path):
    made(tmp_path / "ours").close()
    DiskTier(tmp_path / "theirs", hybrid(content=16), capacity=4 * MIB).close()
    other = DiskTier(tmp_path / "theirs", capacity=4 * MIB)
    other.store(0, [b"k"], [np.ones(other.layout.row_bytes(0), np.uint8)])
    other.close()
    file = data_file(tmp_path / "ours")
    file.write_bytes(data_file(tmp_path / "theirs").read_bytes())
    with pytest.raises(StoreError, match=f"{file.name}: rows of another layout"):
        DiskTier(tmp_path / "ours")


def test_data_files_that_were_found_are_durable_before_their_rows_are_entered(tmp_path):
    """Whoever made them may have died before their names were: a power cut would take the rows
    of everybody who came later."""
    made_and_closed(tmp_path)
    (tmp_path / "index.db").unlink()
    synced: list[str] = []
    files = FaultyFiles()

    def noted(operation, count):
        synced.append(operation)

    files.fault = noted
    tier = DiskTier(tmp_path, files=files)
    num_files = len(list(tmp_path.glob("segment-*.kv")))
    assert num_files
    assert synced.count("sync") == num_files
    assert "sync_directory" in synced[synced.index("sync") :]
    tier.close()


def test_a_rebuilt_index_says_which_data_file_has_no_header(tmp_path):
    lost = made_and_closed(tmp_path)
    (tmp_path / "index.db").unlink()
    with data_file(tmp_path).open("r+b") as file:
        file.write(bytes(4096))
    tier = DiskTier(tmp_path, capacity=4 * MIB)
    assert any("has no valid header" in str(drop) for drop in tier.dropped)
    assert right_rows(tier) == ROWS - lost
    tier.close()


def test_a_data_file_cut_short_keeps_the_rows_before_the_cut(tmp_path):
    there = made_and_closed(tmp_path)
    slot = survey(tmp_path)["groups"][0]["slot_bytes"]
    os.truncate(data_file(tmp_path), 4096 + 3 * slot + 1)
    tier = DiskTier(tmp_path, capacity=4 * MIB)
    assert tier.contains(0, KEYS).sum() == ROWS - there + 3
    assert [drop.rows for drop in tier.dropped] == [there - 3]
    assert right_rows(tier) == ROWS - there + 3
    tier.close()


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("change", [{"slots": 3}, {"slot_bytes": 12288}])
def test_a_header_of_this_layout_with_other_sizes_is_none(tmp_path, has_index, change):
    lost = made_and_closed(tmp_path)
    if not has_index:
        (tmp_path / "index.db").unlink()
    with data_file(tmp_path).open("r+b") as file:
        header = decode_header(file.read(4096))
        assert header is not None
        file.seek(0)
        file.write(replace(header, **change).encode())
    tier = DiskTier(tmp_path, capacity=4 * MIB)
    assert any("has no valid header" in str(drop) for drop in tier.dropped)
    assert right_rows(tier) == ROWS - lost
    tier.close()


@pytest.mark.parametrize("has_index", [True, False])
def test_a_lost_header_is_written_again_and_lost_once(tmp_path, has_index):
    made_and_closed(tmp_path)
    with data_file(tmp_path).open("r+b") as file:
        file.write(bytes(4096))
    if not has_index:
        (tmp_path / "index.db").unlink()
    open_files = len(os.listdir("/proc/self/fd"))
    tier = DiskTier(tmp_path, capacity=4 * MIB)
    assert tier.dropped
    assert tier.store(0, KEYS, [numbered_row(tier, 0, n) for n in range(ROWS)]).all()
    tier.close()
    assert len(os.listdir("/proc/self/fd")) <= open_files
    tier = DiskTier(tmp_path, capacity=4 * MIB)
    assert (right_rows(tier), tier.dropped) == (ROWS, ())
    tier.close()


def test_a_data_file_that_the_index_does_not_list_is_removed(tmp_path):
    made(tmp_path).close()
    first = data_file(tmp_path)
    leftover = tmp_path / "segment-000077.kv"
    leftover.write_bytes(first.read_bytes())
    leftover.chmod(0o600)
    tier = DiskTier(tmp_path)
    assert not leftover.exists()
    assert right_rows(tier) == ROWS
    tier.close()


def test_slots_that_nobody_lists_are_free_again(tmp_path):
    made(tmp_path).close()
    before = survey(tmp_path)["groups"][0]["free_slots"]
    with sqlite3.connect(tmp_path / "index.db") as index:
        index.execute("DELETE FROM slots")
    index.close()
    assert survey(tmp_path)["groups"][0]["free_slots"] == 0
    tier = DiskTier(tmp_path, capacity=4 * MIB)
    assert survey(tmp_path)["groups"][0]["free_slots"] == before > 0
    with tier.index.write() as write:
        assert min(write.free(0, 1 << 20)) >= 0
    tier.close()


@pytest.mark.parametrize("group", [2, 77, 2**32 - 1])
@pytest.mark.parametrize("has_index", [True, False])
def test_a_header_with_a_group_that_the_layout_does_not_have_is_none(tmp_path, group, has_index):
    lost = made_and_closed(tmp_path)
    if not has_index:
        (tmp_path / "index.db").unlink()
    with data_file(tmp_path).open("r+b") as file:
        header = decode_header(file.read(4096))
        file.seek(0)
        file.write(replace(header, group=group).encode())
    tier = DiskTier(tmp_path, capacity=4 * MIB)
    assert any("has no valid header" in str(drop) for drop in tier.dropped)
    assert right_rows(tier) == ROWS - lost
    tier.close()
