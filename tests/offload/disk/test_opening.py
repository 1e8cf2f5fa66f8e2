"""Opening a store: who may read it, what is not taken for it, what the system refuses."""

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstow.errors import StoreError
from kvstow.offload.disk.files import Files
from kvstow.offload.disk.inspect import survey, verify
from kvstow.offload.disk.tier import DiskTier
from kvstow.testing.faulty import Fails, FaultyFiles
from offloading import hybrid, numbered_key, numbered_row

MIB = 1 << 20
KEYS = [numbered_key(n) for n in range(10)]


def made(path):
    tier = DiskTier(path, hybrid(), capacity=MIB)
    assert tier.store(0, KEYS, [numbered_row(tier, 0, n) for n in range(10)]).all()
    tier.close()
    return path


class NoStatvfs(Files):
    def total(self, path):
        raise OSError(errno.EIO, "on purpose")


@pytest.mark.parametrize(
    "options", [{"policy": "fifo"}, {"files": NoStatvfs()}], ids=["policy", "statvfs"]
)
def test_a_store_that_cannot_be_used_is_not_left_open(tmp_path, options):
    made(tmp_path)
    files, threads = os.listdir("/proc/self/fd"), threading.active_count()
    with pytest.raises(StoreError):
        DiskTier(tmp_path, **options)
    assert os.listdir("/proc/self/fd") == files
    assert threading.active_count() == threads
    tier = DiskTier(tmp_path)
    assert tier.index.ask("SELECT COUNT(*) FROM owners") == [(1,)]
    tier.close()


def right_rows(tier):
    """How many of the rows are served; every one that is, is right."""
    rows = [np.zeros(tier.layout.row_bytes(0), np.uint8) for _ in KEYS]
    mask = tier.load(0, KEYS, rows)
    assert all((rows[n] == numbered_row(tier, 0, n)).all() for n in np.flatnonzero(mask))
    return int(mask.sum())


def kvstow(*words):
    return subprocess.run(
        [sys.executable, "-m", "kvstow", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
    )


# ── whose files ───────────────────────────────────────────────────────────────────────


def test_a_store_is_closed_to_other_users_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        made(tmp_path / "s")
        tier = DiskTier(tmp_path / "s")
        modes = {f.name: stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "s").iterdir()}
        tier.close()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert set(modes.values()) == {0o600}
    assert {"layout.json", "index.db", "index.db-wal", "lock", "segment-000000.kv"} <= set(modes)


FILES = ["layout.json", "index.db", "lock", "segment-000000.kv"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("plant", ["link", "second name", "mode"])
def test_planted_files_are_refused(tmp_path, file, plant):
    path = made(tmp_path / "s") / file
    match plant:
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case "second name":
            os.link(path, tmp_path / "elsewhere")
        case "mode":
            path.chmod(0o666)
    with pytest.raises(StoreError, match=r"it is a link|2 names|others may open it"):
        DiskTier(tmp_path / "s")


def test_a_directory_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o777)
    with pytest.raises(StoreError, match=r"others may write to it .* chmod 700"):
        DiskTier(tmp_path / "s", hybrid(), capacity=MIB)
    assert not list((tmp_path / "s").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_refused(tmp_path):
    os.chown(made(tmp_path / "s") / "segment-000000.kv", 12345, 12345)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        DiskTier(tmp_path / "s")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_what_is_no_ordinary_file_is_refused_and_nothing_hangs(tmp_path, file, kind):
    path = made(tmp_path / "s") / file
    path.unlink()
    os.mkfifo(path, 0o600) if kind == "fifo" else path.mkdir(mode=0o700)
    with pytest.raises(StoreError):
        DiskTier(tmp_path / "s", hybrid())
    if file == "layout.json":
        done = kvstow("store", "inspect" if kind == "fifo" else "verify", tmp_path / "s")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr


# ── what cannot be ────────────────────────────────────────────────────────────────────


def test_other_names_among_the_data_files_are_left_alone(tmp_path):
    made(tmp_path)
    for name in ("segment-foo.kv", "segment-1.kv", "segment-000001.kv.bak"):
        (tmp_path / name).write_bytes(b"mine")
    tier = DiskTier(tmp_path)
    assert right_rows(tier) == 10
    tier.close()
    assert (tmp_path / "segment-foo.kv").read_bytes() == b"mine"
    assert survey(tmp_path)["rows"] == 10


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE segments SET slots = 1 << 60",
        "UPDATE segments SET slots = -1",
        "UPDATE segments SET grp = 77",
        "UPDATE segments SET id = -1 WHERE id = 0",
        "UPDATE meta SET value = 1 << 60 WHERE name = 'segment_bytes'",
        "UPDATE meta SET value = 'many' WHERE name = 'segment_bytes'",
        "UPDATE meta SET value = 4096 WHERE name = 'segment_bytes'",
        "DROP TABLE slots",
    ],
)
def test_an_index_that_says_what_cannot_be_is_made_again(tmp_path, statement):
    made(tmp_path)
    with sqlite3.connect(tmp_path / "index.db") as index:
        index.execute(statement)
    index.close()
    tier = DiskTier(tmp_path, capacity=MIB)
    assert right_rows(tier) == 10
    assert "made again" in str(tier.dropped[0])
    tier.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE segments SET grp = 'x'",
        "UPDATE rows SET generation = 'x'",
        "UPDATE rows SET checksum = x''",
        "UPDATE rows SET key = 7 WHERE place = 3",
        "UPDATE rows SET key = '' WHERE place = 3",
        "UPDATE owners SET pid = 'x', started = x'', host = 7, beat = 'y'",
    ],
)
def test_values_of_the_wrong_type_in_an_index_are_found_by_whoever_reads_them(tmp_path, statement):
    made(tmp_path)
    with sqlite3.connect(tmp_path / "index.db") as index:
        index.execute("INSERT INTO owners (pid, started, host, beat) VALUES (1, 1, 'h', 0)")
        index.execute(statement)
    index.close()
    tier = DiskTier(tmp_path, capacity=MIB)
    assert right_rows(tier) >= 9
    assert verify(tier).rows == 10
    assert right_rows(tier) == 10
    tier.close()


@pytest.mark.parametrize("command", ["verify", "prune"])
def test_a_store_without_an_index_can_be_looked_after(tmp_path, command):
    made(tmp_path)
    for file in tmp_path.glob("index.db*"):
        file.unlink()
    if command == "verify":
        tier = DiskTier(tmp_path)
        result = verify(tier)
        assert (result.rows, result.damaged) == (10, ())
        tier.close()
        assert kvstow("store", "verify", tmp_path, "--json").returncode == 0
    else:
        done = kvstow("store", "prune", tmp_path, "--to", "1", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["rows"] == 10
        assert not list(tmp_path.glob("segment-*.kv"))


def test_a_path_with_signs_that_mean_something_to_sqlite_can_be_inspected(tmp_path):
    made(tmp_path / "a?b%41#c")
    assert survey(tmp_path / "a?b%41#c")["rows"] == 10


# ── what the system refuses ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("operation", ["open", "allocate", "write", "sync"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_errors_of_the_system_while_rows_are_stored_are_store_errors(tmp_path, operation, number):
    files = FaultyFiles(lambda op, n: Fails(number) if op == operation else None)
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=files)
    rows = [numbered_row(tier, 0, n) for n in range(10)]
    with pytest.raises(StoreError, match=os.strerror(number)):
        tier.store(0, KEYS, rows)
    files.fault = lambda op, n: None
    assert tier.index.ask("SELECT COUNT(*) FROM slots WHERE owner > 0") == [(0,)]
    assert tier.store(0, KEYS, rows).all()
    assert right_rows(tier) == 10
    tier.close()


def test_a_directory_that_cannot_be_made_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "s"):
        with pytest.raises(StoreError):
            DiskTier(path, hybrid(), capacity=MIB)


def test_a_closed_tier_refuses_everything_and_closing_twice_is_fine(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    row = numbered_row(tier, 0, 0)
    tier.close()
    tier.close()
    for work in (
        lambda: tier.store(0, KEYS[:1], [row]),
        lambda: tier.load(0, KEYS[:1], [row]),
        lambda: tier.contains(0, KEYS),
        lambda: tier.evict(0, KEYS),
        lambda: tier.prune(0),
    ):
        with pytest.raises(StoreError, match="closed"):
            work()


def test_without_threads_everything_happens_in_the_callers(tmp_path):
    before = set(threading.enumerate())
    seen = set()

    class Watched(FaultyFiles):
        def write(self, fd, parts, offset):
            seen.add(threading.get_ident())
            super().write(fd, parts, offset)

    now = 1000.0
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=Watched(), threads=0, clock=lambda: now)
    assert tier.store(0, KEYS, [numbered_row(tier, 0, n) for n in range(10)]).all()
    assert right_rows(tier) == 10
    assert set(threading.enumerate()) <= before
    assert seen == {threading.get_ident()}
    assert tier.index.ask("SELECT beat FROM owners") == [(now,)]
    tier.close()


def test_the_store_is_found_by_a_path_in_words(tmp_path):
    tier = DiskTier(str(tmp_path / "s"), hybrid(), capacity=MIB)
    assert tier.path == Path(tmp_path / "s")
    tier.close()


# ── sizes, clocks, names ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("capacity", [-1, 0, 1, 4096])
def test_a_capacity_that_is_refused_leaves_the_stores_own(tmp_path, capacity):
    path = made(tmp_path / "s")
    with pytest.raises(StoreError, match=rf"(?s)a capacity of {capacity} bytes.*hint"):
        DiskTier(path, capacity=capacity)
    tier = DiskTier(path)
    assert tier.usage.capacity == MIB
    assert right_rows(tier) == 10
    tier.close()


def test_a_capacity_beyond_the_file_system_costs_no_memory(tmp_path):
    tier = DiskTier(tmp_path / "s", hybrid(), capacity=1 << 62)
    assert tier.store(0, KEYS, [numbered_row(tier, 0, n) for n in range(10)]).all()
    assert right_rows(tier) == 10
    assert tier.usage.capacity == 1 << 62
    tier.close()


def test_a_new_store_without_a_capacity_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(
        StoreError, match=r"(?s)no capacity given.*hint: Store\(disk=..., disk_bytes"
    ):
        DiskTier(tmp_path / "s", hybrid())
    DiskTier(tmp_path / "s", hybrid(), capacity=MIB).close()


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_was_set_does_not_keep_a_broken_index(tmp_path, jump):
    now = [1e9]
    one = DiskTier(made(tmp_path / "s"), clock=lambda: now[0])
    now[0] += jump
    (tmp_path / "s" / "index.rebuild").touch(mode=0o600)  # another process found it broken
    assert right_rows(one) == 10
    assert not (tmp_path / "s" / "index.rebuild").exists()
    one.close()


def test_a_clock_that_was_set_back_does_not_silence_an_owner(tmp_path):
    now = [1e9]
    tier = DiskTier(made(tmp_path / "s"), clock=lambda: now[0])
    assert right_rows(tier) == 10
    now[0] -= 1e6
    assert right_rows(tier) == 10
    (owner,) = survey(tmp_path / "s")["owners"]
    assert owner["beat"] == now[0]
    tier.close()


def test_a_lost_row_is_a_miss_though_the_index_cannot_be_written(tmp_path, monkeypatch):
    path = made(tmp_path / "s")
    tier = DiskTier(path)
    (file,) = path.glob("segment-*.kv")
    with file.open("r+b") as data:
        data.seek(4096 + 100)
        data.write(b"another byte")

    def full(undone=None):
        raise StoreError("index: database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(tier.index, "write", full)
        assert right_rows(tier) == 9
    assert right_rows(tier) == 9
    assert tier.counts.failures == 1
    tier.close()


@contextlib.contextmanager
def nobodys_directory():
    """A directory of a user who is not allowed everything, whose process this is meanwhile."""
    user = os.geteuid() or 65534
    path = Path(tempfile.mkdtemp())
    try:
        os.chown(path, user, -1)
        os.seteuid(user)
        yield path
    finally:
        os.seteuid(os.getuid())
        shutil.rmtree(path)


def test_a_directory_that_may_not_be_looked_into_is_a_store_error_until_it_may():
    now = [1e9]
    with nobodys_directory() as path:
        tier = DiskTier(made(path / "s"), clock=lambda: now[0])
        row = np.zeros(tier.layout.row_bytes(0), np.uint8)
        calls = [
            lambda: tier.contains(0, [b"a"]),
            lambda: tier.load(0, [b"a"], [row]),
            lambda: tier.store(0, [b"a"], [row]),
            lambda: tier.evict(0, [b"a"]),
            lambda: tier.usage,
            tier.beat,
        ]
        (path / "s").chmod(0)
        for call in calls:
            now[0] += 10
            with pytest.raises(StoreError, match="Permission denied"):
                call()
        (path / "s").chmod(0o700)
        now[0] += 10
        assert right_rows(tier) == 10
        tier.close()


def test_a_path_that_is_not_utf8_can_be_used_and_inspected(tmp_path):
    path = made(tmp_path / os.fsdecode(b"caf\xe9 % ? #"))
    assert survey(path)["rows"] == 10
    tier = DiskTier(path)
    assert verify(tier).damaged == ()
    tier.close()


def test_a_directory_removed_and_made_again_underneath_gives_misses(tmp_path):
    one = DiskTier(made(tmp_path / "s"))
    for file in (tmp_path / "s").iterdir():
        file.unlink()
    (tmp_path / "s").rmdir()
    assert right_rows(one) == 0
    made(tmp_path / "s")
    right_rows(one)  # those that it serves are right
    with contextlib.suppress(StoreError):
        one.store(0, [numbered_key(99)], [numbered_row(one, 0, 99)])
    other = DiskTier(tmp_path / "s")
    assert right_rows(other) == 10
    other.close()
    with contextlib.suppress(StoreError):
        one.close()


@pytest.mark.parametrize("look", ["a second tier", "survey"])
def test_another_look_at_a_store_in_one_process_leaves_its_index_shared_with_others(tmp_path, look):
    """Closing a file drops the process's locks on it: another process, whose SQLite then found
    nobody, removed the log of an index in use, and no row entered after that was seen again."""
    path = made(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        tier = stack.enter_context(contextlib.closing(DiskTier(path)))
        tier.evict(0, KEYS[:1])
        if look == "survey":
            survey(path)
        else:
            stack.enter_context(contextlib.closing(DiskTier(path)))
        assert kvstow("store", "verify", path).returncode == 0
        assert tier.store(0, KEYS[:1], [numbered_row(tier, 0, 0)]).all()
        seen = kvstow("store", "verify", path, "--json")
        assert json.loads(seen.stdout)["rows"] == len(KEYS)
