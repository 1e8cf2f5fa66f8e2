"""Opening a store: who may read it, what is not taken for it, what the system refuses."""

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faulty import FaultyFiles
from kvstow.errors import StoreError
from kvstow.offload.disk.inspect import survey, verify
from kvstow.offload.disk.opening import stored_layout
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.rows import row_layout
from kvstow.plan.manifest import MAX_BYTES, encode
from offloading import hybrid, numbered_key, numbered_row, row_files

MIB = 1 << 20
KEYS = [numbered_key(n) for n in range(10)]


def made(path):
    tier = DiskTier(path, hybrid(), capacity=MIB)
    assert tier.store(0, KEYS, [numbered_row(tier, 0, n) for n in range(10)]).all()
    tier.close()
    return path


def test_a_store_that_cannot_be_used_is_not_left_open(tmp_path):
    made(tmp_path)
    files, threads = os.listdir("/proc/self/fd"), threading.active_count()
    for options in ({"capacity": 1}, {"layout": hybrid(model="another")}):
        with pytest.raises(StoreError):
            DiskTier(tmp_path, **options)
    assert os.listdir("/proc/self/fd") == files
    assert threading.active_count() == threads


def test_a_capacity_that_is_not_given_again_stays_and_is_not_written_again(tmp_path):
    made(tmp_path)
    file = tmp_path / "store.json"
    before = file.stat().st_ino
    for capacity in (None, MIB, None):
        with contextlib.closing(DiskTier(tmp_path, capacity=capacity)) as tier:
            assert tier.capacity == MIB
    assert file.stat().st_ino == before
    DiskTier(tmp_path, capacity=2 * MIB).close()
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        assert tier.capacity == 2 * MIB


def test_a_capacity_that_cannot_be_written_down_is_used_all_the_same(tmp_path, monkeypatch, caplog):
    made(tmp_path)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    with contextlib.closing(DiskTier(tmp_path, capacity=2 * MIB)) as tier:
        assert tier.capacity == 2 * MIB
    assert "its capacity is not written down: [Errno 28] No space left" in caplog.text
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        assert tier.capacity == MIB


def test_a_layout_that_does_not_say_which_computation_makes_the_rows_is_refused(tmp_path):
    made(tmp_path)
    (tmp_path / "layout.json").write_bytes(encode(replace(row_layout(hybrid()), identity=None)))
    with pytest.raises(StoreError, match=r"layout.json does not say which computation"):
        DiskTier(tmp_path, hybrid())


def test_a_layout_that_is_too_long_is_refused(tmp_path):
    made(tmp_path)
    file = tmp_path / "layout.json"
    file.write_bytes(file.read_bytes().ljust(MAX_BYTES))
    assert stored_layout(tmp_path) == row_layout(hybrid())
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(StoreError, match=rf"layout.json cannot be read: .*at most {MAX_BYTES}"):
        DiskTier(tmp_path)


def test_whoever_makes_a_store_a_moment_later_must_have_the_same_layout(tmp_path, monkeypatch):
    link = os.link

    def after_another(new, name):
        shutil.copy(new, name)
        Path(name).write_bytes(encode(row_layout(hybrid(model="another"))))
        link(new, name)

    monkeypatch.setattr(os, "link", after_another)
    with pytest.raises(StoreError, match="rows of another model"):
        DiskTier(tmp_path, hybrid(), capacity=MIB)
    assert stored_layout(tmp_path).model == "another"


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
        modes = {f: stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "s").rglob("*")}
        tier.close()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert {mode for file, mode in modes.items() if file.is_file()} == {0o600}
    assert {mode for file, mode in modes.items() if file.is_dir()} == {0o700}


def plant(path, elsewhere, what):
    """Something else in place of a file, and what is said of it."""
    path.rename(elsewhere)
    match what:
        case "a link":
            path.symlink_to(elsewhere)
        case "no ordinary file":
            os.mkfifo(path, 0o600)
        case "others may open it":
            elsewhere.rename(path)
            path.chmod(0o666)
        case "another user's":
            elsewhere.rename(path)
            os.chown(path, 12345, 12345)
        case "a directory":
            path.mkdir(mode=0o700)


PLANTED = {
    "a link": "it is a link",
    "no ordinary file": "it is no ordinary file",
    "others may open it": "others may open it",
    "a directory": "it is no ordinary file",
}
if os.geteuid() == 0:  # who else can give files away
    PLANTED["another user's"] = "belongs to user 12345"


@pytest.mark.parametrize("what", PLANTED)
def test_planted_descriptions_are_refused_and_nothing_hangs(tmp_path, what):
    path = made(tmp_path / "s") / "layout.json"
    plant(path, tmp_path / "elsewhere", what)
    with pytest.raises(StoreError, match=PLANTED[what]):
        DiskTier(tmp_path / "s", hybrid())
    done = kvstow("store", "verify", tmp_path / "s")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("what", PLANTED)
def test_planted_row_files_are_counted_misses_and_nothing_hangs(tmp_path, what):
    tier = DiskTier(tmp_path / "s", hybrid(), capacity=MIB)
    for n, key in enumerate(KEYS):
        tier.store(0, [key], [numbered_row(tier, 0, n)])
    plant(row_files(tmp_path / "s")[3], tmp_path / "elsewhere", what)
    assert right_rows(tier) == 9
    assert tier.counts.failures == 1
    tier.close()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o777)
    with pytest.raises(StoreError, match=r"others may write to it .* chmod 700"):
        DiskTier(tmp_path / "s", hybrid(), capacity=MIB)
    assert not list((tmp_path / "s").iterdir())


def test_other_names_in_the_tree_are_left_alone(tmp_path):
    made(tmp_path)
    directory = row_files(tmp_path)[0].parent
    for name in ("foo", "0f0", "00zz", "README"):
        (directory / name).write_bytes(b"mine")
        (directory.parent / name).write_bytes(b"mine")
    tier = DiskTier(tmp_path)
    assert right_rows(tier) == 10
    assert tier.usage.rows == survey(tmp_path)["rows"] == 10
    assert tier.prune(0) == 10
    tier.close()
    assert (directory / "foo").read_bytes() == b"mine"


@pytest.mark.parametrize("command", ["verify", "prune", "inspect"])
@pytest.mark.parametrize(
    "stated",
    [
        None,
        "{}",
        "[1",
        '{"format": 2, "capacity": 5}',
        '{"format": 3, "capacity": 0}',
        "9" * 5000,
    ],
)
def test_a_store_that_does_not_state_its_capacity_can_be_looked_after(tmp_path, command, stated):
    made(tmp_path)
    file = tmp_path / "store.json"
    file.unlink() if stated is None else file.write_text(stated)
    options = ["--to", "1KiB"] if command == "prune" else []
    done = kvstow("store", command, tmp_path, *options, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 10


# ── what the system refuses ───────────────────────────────────────────────────────────


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
        def write(self, fd, parts):
            seen.add(threading.get_ident())
            super().write(fd, parts)

    now = 1000.0
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=Watched(), threads=0, clock=lambda: now)
    assert tier.store(0, KEYS, [numbered_row(tier, 0, n) for n in range(10)]).all()
    assert right_rows(tier) == 10
    assert set(threading.enumerate()) <= before
    assert seen == {threading.get_ident()}
    assert {file.stat().st_mtime for file in row_files(tmp_path)} == {now}
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


def test_a_new_store_without_a_capacity_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(
        StoreError, match=r"(?s)no capacity given.*hint: Store\(disk=..., disk_bytes"
    ):
        DiskTier(tmp_path / "s", hybrid())
    DiskTier(tmp_path / "s", hybrid(), capacity=MIB).close()


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


def test_a_directory_that_may_not_be_looked_into_gives_misses_and_store_errors_until_it_may():
    with nobodys_directory() as path:
        tier = DiskTier(made(path / "s"))
        (path / "s").chmod(0)
        assert right_rows(tier) == 0
        with pytest.raises(StoreError, match="Permission denied"):
            tier.store(0, [b"a"], [numbered_row(tier, 0, 0)])
        (path / "s").chmod(0o700)
        assert right_rows(tier) == 10
        tier.close()


def test_a_path_that_is_not_utf8_can_be_used_and_inspected(tmp_path):
    path = made(tmp_path / os.fsdecode(b"caf\xe9 % ? #"))
    assert survey(path)["rows"] == 10
    tier = DiskTier(path)
    assert verify(tier).damaged == ()
    tier.close()
