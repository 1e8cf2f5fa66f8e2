"""Faults for real: killed and stopped processes, cut power, flipped bytes, a full disk, foreign
files. Nothing wrong is served, and what was kept is there, but for evictions.

Rows are a function of their key, so whoever reads one can tell whether it is right.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from faulty import FaultyFiles
from kvstow.errors import StoreError
from kvstow.offload.disk.files import Files
from kvstow.offload.disk.tier import DiskTier
from offloading import hybrid, row_files
from offloading import numbered_key as key
from offloading import numbered_row as row

MIB = 1 << 20
HERE = Path(__file__).parents[2]
LAYOUT = hybrid(content=256)

COMMON = f"""
import sys, time
sys.path[:0] = [{str(HERE)!r}]
import numpy as np
from pathlib import Path
from offloading import hybrid, numbered_key as key, numbered_row as row
from kvstow.offload.disk.tier import DiskTier
"""

WRITER = COMMON + textwrap.dedent("""
    tier = DiskTier(Path(sys.argv[1]), hybrid(content=256), capacity=int(sys.argv[3]))
    dice = np.random.default_rng(int(sys.argv[2]))
    print("ready", flush=True)
    while True:
        group = int(dice.integers(2))
        numbers = np.unique(dice.integers(0, 600, int(dice.integers(1, 60)))).tolist()
        kept = tier.store(group, [key(n) for n in numbers], [row(tier, group, n) for n in numbers])
        print(group, *(n for n, ok in zip(numbers, kept) if ok), flush=True)
""")

READER = COMMON + textwrap.dedent("""
    tier = DiskTier(Path(sys.argv[1]), hybrid(content=256))
    print("ready", flush=True)
    for line in sys.stdin:
        hits = 0
        for group in range(2):
            rows = [np.zeros(tier.layout.row_bytes(group), np.uint8) for _ in range(600)]
            found = tier.load(group, [key(n) for n in range(600)], rows)
            for n in np.flatnonzero(found).tolist():
                assert (rows[n] == row(tier, group, n)).all(), f"row {n} of group {group} is wrong"
            hits += int(found.sum())
        print(hits, tier.counts.failures, flush=True)
    tier.close()
""")


@contextmanager
def process(code, *arguments):
    """A process that has said that it is ready; it is killed at the end if not before."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "ready\n", child.stderr.read()
        yield child
    finally:
        child.kill()
        child.communicate()


def store_all(tier, count, step, first=0):
    for start in range(first, first + count, step):
        numbers = range(start, start + step)
        tier.store(0, [key(n) for n in numbers], [row(tier, 0, n) for n in numbers])


def right_rows(tier, count=600):
    """Which rows are served, group and number; each is known to be right."""
    served = set()
    for group in range(len(tier.layout.groups)):
        rows = [np.full(tier.layout.row_bytes(group), 0xEE, np.uint8) for _ in range(count)]
        mask = tier.load(group, [key(n) for n in range(count)], rows)
        for n in np.flatnonzero(mask).tolist():
            assert (rows[n] == row(tier, group, n)).all(), f"row {n} of group {group} is wrong"
            served.add((group, n))
    return served


# ── killed and stopped ────────────────────────────────────────────────────────────────


def kill_writers(path, rounds, seed):
    """Writers are killed at any moment: what they called kept is there, and nothing else wrong."""
    dice = random.Random(seed)
    acknowledged = set()
    for number in range(rounds):
        with process(WRITER, path, seed + number, 64 * MIB) as writer:
            time.sleep(dice.random() * 0.4)
            writer.send_signal(signal.SIGKILL)
            said = writer.stdout.read()  # `communicate` would lose what was read ahead
        for line in said.splitlines(keepends=True):
            group, *numbers = map(int, line.split()) if line.endswith("\n") else (0,)
            acknowledged |= {(group, n) for n in numbers}
        tier = DiskTier(path)
        assert acknowledged <= right_rows(tier), f"round {number}"
        assert tier.counts.failures == 0
        assert not list((path / "new").iterdir())
        tier.close()
        if number % 10 == 9:
            shutil.rmtree(path)
            acknowledged.clear()


def test_a_writer_killed_at_any_moment_leaves_what_it_called_kept_and_nothing_wrong(tmp_path):
    kill_writers(tmp_path / "s", 6, 0)


OPENER = COMMON + textwrap.dedent("""
    import os, signal
    sync, left = os.fsync, int(sys.argv[3])
    def killed(fd):
        global left
        left -= 1
        sync(fd) if left >= 0 else os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = killed
    print("ready", flush=True)
    DiskTier(Path(sys.argv[1]), hybrid(content=256), capacity=int(sys.argv[2]))
""")


@pytest.mark.parametrize("file", range(2))
def test_whoever_is_killed_while_a_store_is_described_leaves_nothing(tmp_path, file):
    """The layout is written first, then the capacity; each has no name in the store yet."""
    with process(OPENER, tmp_path, 64 * MIB, file) as opener:
        assert opener.wait(60) == -signal.SIGKILL
    assert [path.stat().st_size > 0 for path in (tmp_path / "new").glob("*/*")] == [True]
    with closing(DiskTier(tmp_path, LAYOUT, capacity=64 * MIB)):
        pass
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert names == {"new", "layout.json", "store.json"}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_five_hundred_writers_killed(tmp_path, part):
    kill_writers(tmp_path / "s", 50, 1000 * (part + 1))


def test_rows_are_right_while_two_processes_overflow_one_store_and_one_is_killed(tmp_path):
    with (
        process(WRITER, tmp_path, 1, 8 * MIB) as one,
        process(WRITER, tmp_path, 2, 8 * MIB),
        process(READER, tmp_path) as reader,
    ):
        step, hits = 0, 0
        while step < 6 or hits <= 100:
            step += 1
            if step == 4:
                one.kill()
                one.wait()
            reader.stdin.write("go\n")
            reader.stdin.flush()
            line = reader.stdout.readline()
            assert line, reader.stderr.read()
            count, failures = map(int, line.split())
            hits += count
            assert failures == 0
    with closing(DiskTier(tmp_path)) as tier:
        right_rows(tier)
        assert tier.counts.failures == 0
        assert tier.usage.nbytes <= 8 * MIB


@pytest.mark.parametrize("seed", range(3))
def test_a_stopped_process_keeps_nobody_from_opening_storing_or_loading(tmp_path, seed):
    with process(WRITER, tmp_path, seed, 8 * MIB) as writer:
        time.sleep(0.05 + 0.1 * seed)
        writer.send_signal(signal.SIGSTOP)
        with closing(DiskTier(tmp_path)) as tier:
            store_all(tier, 40, 40, first=1000)
            found = tier.contains(0, [key(n) for n in range(1000, 1040)])
            assert found.all()
            right_rows(tier)
            assert tier.counts.failures == 0


def test_many_processes_may_make_one_store_at_the_same_time(tmp_path):
    make = COMMON + textwrap.dedent("""
        tier = DiskTier(Path(sys.argv[1]), hybrid(content=256), capacity=8 << 20)
        n = int(sys.argv[2])
        assert tier.store(0, [key(n)], [row(tier, 0, n)]).all()
        print("ready", flush=True)
        sys.stdin.read()
        tier.close()
    """)
    path = tmp_path / "s"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", make, str(path), str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    for child in children:
        assert child.communicate("", timeout=120)[0] == "ready\n"
        assert child.returncode == 0
    with closing(DiskTier(path)) as tier:
        assert right_rows(tier) == {(0, n) for n in range(4)}
    assert {file.name for file in path.iterdir() if file.is_file()} == {"layout.json", "store.json"}


# ── power ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(8))
def test_a_power_cut_at_any_step_never_leaves_a_wrong_row_nor_half_of_one(tmp_path, seed):
    class Cut(Exception):
        pass

    dice = random.Random(seed)
    files = FaultyFiles(keep_unsynced=True)
    operation = dice.choice(["create", "write", "sync", "rename", "link", "remove"])
    last = dice.randrange(3, 14)

    def fault(name, count):
        if name == operation and count >= last:
            raise Cut

    files.fault = fault
    tier = DiskTier(tmp_path, LAYOUT, capacity=2 * MIB, files=files, threads=0)

    def store_until_it_is_cut():
        for n in range(0, 600, 12):
            store_all(tier, 12, dice.choice([1, 12]), first=n)

    with pytest.raises(Cut):
        store_until_it_is_cut()
    files.cut(seed)
    with closing(DiskTier(tmp_path)) as again:
        right_rows(again)
        assert again.counts.failures == 0  # what was not synced had no name


def test_a_disk_that_forgets_synced_data_is_found_out(tmp_path):
    """A drive that lies about flushing: rows have their names, their sectors are old."""

    class Lying(FaultyFiles):
        def sync(self, paths):
            pass

    files = Lying(keep_unsynced=True)
    tier = DiskTier(tmp_path, LAYOUT, capacity=4 * MIB, files=files)
    store_all(tier, 120, 12)
    tier.close()
    files.cut(1)
    with closing(DiskTier(tmp_path)) as again:
        assert len(right_rows(again)) < 120
        assert again.counts.failures > 0


# ── bytes that are not what they were ─────────────────────────────────────────────────


def filled(path, count=60):
    tier = DiskTier(path, LAYOUT, capacity=16 * MIB)
    for group in range(2):
        for start in range(0, count, 20):
            numbers = range(start, start + 20)
            tier.store(group, [key(n) for n in numbers], [row(tier, group, n) for n in numbers])
    tier.close()
    return path


def damaged(dice, data, other):
    """Bytes that somebody may find in place of a file."""
    kind = dice.randrange(6)
    if kind == 0:
        return data[: dice.randrange(len(data) + 1)]
    if kind == 1:
        at = dice.randrange(len(data)) // 4096 * 4096
        return data[:at] + bytes(min(4096, len(data) - at)) + data[at + 4096 :]
    if kind == 2:
        return other
    if kind == 3:
        at = dice.randrange(len(data)) // 4096 * 4096
        return data[:at] + other[at:]
    spoilt = bytearray(data)
    for _ in range(1 if kind == 4 else dice.randrange(1, 200)):
        spoilt[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(spoilt)


@pytest.mark.parametrize("seed", range(12))
def test_torn_truncated_swapped_and_flipped_files_are_counted_misses(tmp_path, seed):
    dice = random.Random(seed)
    path = filled(tmp_path / "s")
    files = sorted({file.stat().st_ino: file for file in row_files(path)}.values())
    for file in dice.sample(files, max(1, len(files) // 2)):
        other = dice.choice(files).read_bytes()
        file.write_bytes(damaged(dice, file.read_bytes(), other))
    with closing(DiskTier(path)) as tier:
        present = sum(int(tier.contains(g, [key(n) for n in range(60)]).sum()) for g in range(2))
        served = right_rows(tier)
        assert present == 120
        assert tier.counts.failures == 120 - len(served)
        assert right_rows(tier) == served  # lost once
        assert tier.counts.failures == 120 - len(served)


@pytest.mark.parametrize("seed", range(4))
def test_files_that_were_renamed_to_other_keys_and_groups_are_misses(tmp_path, seed):
    dice = random.Random(seed)
    path = filled(tmp_path / "s")
    names = row_files(path)
    shuffled = dice.sample(names, len(names))
    for name in names:
        name.rename(f"{name}.moved")
    for name, target in zip(names, shuffled, strict=True):
        Path(f"{name}.moved").rename(target)
    with closing(DiskTier(path)) as tier:
        right_rows(tier)


@pytest.mark.parametrize("file", ["layout.json", "store.json"])
@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_description_gives_rows_misses_or_a_refusal_in_words(tmp_path, file, seed):
    dice = random.Random(seed)
    path = filled(tmp_path / "s", 20) / file
    path.write_bytes(damaged(dice, path.read_bytes(), b"{}" * 5000))
    for layout in (None, LAYOUT):
        with suppress(StoreError), closing(DiskTier(path.parent, layout)) as tier:
            right_rows(tier)


def test_a_description_that_is_deleted_while_the_store_is_in_use_is_not_missed(tmp_path):
    with closing(DiskTier(tmp_path, LAYOUT, capacity=16 * MIB)) as tier:
        store_all(tier, 20, 20)
        for file in ("layout.json", "store.json"):
            (tmp_path / file).write_bytes(os.urandom(5000))
        store_all(tier, 20, 20, first=20)
        for file in ("layout.json", "store.json"):
            (tmp_path / file).unlink()
        store_all(tier, 20, 20, first=40)
        assert right_rows(tier) == {(0, n) for n in range(60)}
        with pytest.raises(StoreError, match=r"layout\.json is missing"):
            DiskTier(tmp_path)
        with closing(DiskTier(tmp_path, LAYOUT)) as again:
            assert right_rows(again) == {(0, n) for n in range(60)}


def test_rows_removed_under_a_running_process_cost_themselves_only(tmp_path):
    with closing(DiskTier(tmp_path, LAYOUT, capacity=16 * MIB)) as tier:
        store_all(tier, 60, 20)
        for name in row_files(tmp_path)[::2]:
            name.unlink()
        assert len(right_rows(tier)) == 30
        shutil.rmtree(next(tmp_path.glob("rows-*")))
        shutil.rmtree(tmp_path / "new")
        assert not right_rows(tier)
        assert tier.counts.failures == 0
        store_all(tier, 60, 20)
        assert len(right_rows(tier)) == 60


# ── full ──────────────────────────────────────────────────────────────────────────────


@contextmanager
def small_disk(path, nbytes):
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no small tmpfs for a full disk: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill_up(path):
    """A file that takes all that is left of a file system."""
    ballast = path / "ballast"
    file = os.open(ballast, os.O_CREAT | os.O_WRONLY)
    with suppress(OSError):
        while True:
            os.write(file, bytes(4096))
    os.close(file)
    return ballast


def test_a_full_disk_keeps_what_fits_and_serves_it_and_says_so_once(tmp_path, caplog):
    with small_disk(tmp_path / "small", 3 * MIB) as path:
        tier = DiskTier(path / "store", LAYOUT, capacity=64 * MIB)
        store_all(tier, 300, 20)
        kept = right_rows(tier)
        assert 0 < len(kept) < 300
        assert tier.usage.nbytes <= 3 * MIB
        assert tier.counts.failures == 0
        assert len([each for each in caplog.messages if "rows are dropped for others" in each]) == 1
        tier.close()
        with closing(DiskTier(path / "store")) as tier:
            assert right_rows(tier) == kept


def test_a_store_on_a_full_disk_opens_serves_and_closes_and_stores_when_there_is_room(tmp_path):
    with small_disk(tmp_path / "small", 6 * MIB) as path:
        with closing(DiskTier(path / "store", LAYOUT, capacity=MIB)) as tier:
            store_all(tier, 20, 20)
            kept = right_rows(tier)
        ballast = fill_up(path)
        with closing(DiskTier(path / "store", LAYOUT, capacity=2 * MIB)) as tier:
            assert right_rows(tier) == kept
            with suppress(StoreError):
                store_all(tier, 40, 20, first=100)
            right_rows(tier)
            ballast.unlink()
            store_all(tier, 20, 20, first=200)
            assert tier.contains(0, [key(n) for n in range(200, 220)]).all()
            right_rows(tier)
            assert tier.counts.failures == 0


def test_a_limit_on_the_size_of_files_is_a_store_error(tmp_path):
    child = COMMON + textwrap.dedent("""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        tier = DiskTier(Path(sys.argv[1]), hybrid(content=256), capacity=8 << 20)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        try:
            tier.store(0, [key(1)], [row(tier, 0, 1)])
        except Exception as error:
            print(type(error).__name__, error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.RLIM_INFINITY))
        print(tier.store(0, [key(1)], [row(tier, 0, 1)]).all())
    """)
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path)], capture_output=True)
    assert b"StoreError" in done.stdout, done.stderr
    assert b"File too large" in done.stdout
    assert done.stdout.endswith(b"True\n")
    with closing(DiskTier(tmp_path)) as tier:
        assert right_rows(tier) == {(0, 1)}


# ── interrupted ───────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_load_ends_when_nothing_writes_to_its_rows_any_more(tmp_path):
    layout = hybrid(content=4096)
    with closing(DiskTier(tmp_path, layout, capacity=64 * MIB)) as tier:
        store_all(tier, 8, 8)
    begun, may_end, ended = threading.Event(), threading.Event(), []

    class Slow(Files):
        def read(self, fd, parts, offset):
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                may_end.wait(10)
                ended.append(1)
            return super().read(fd, parts, offset)

    def interrupt():
        begun.wait(10)
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.5)
        may_end.set()

    tier = DiskTier(tmp_path, files=Slow())
    rows = [np.zeros(tier.layout.row_bytes(0), np.uint8) for _ in range(8)]
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        tier.load(0, [key(n) for n in range(8)], rows)
    assert ended
    thread.join()
    tier.close()
