"""Faults for real: killed processes, cut power, flipped bytes, a full disk, missing files.

Rows are a function of their key, so whoever reads one can tell whether it is right.
"""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvstow.errors import StoreError
from kvstow.offload.disk.files import Files
from kvstow.offload.disk.tier import DiskTier
from kvstow.testing.faulty import Fails, FaultyFiles
from offloading import hybrid
from offloading import numbered_key as key
from offloading import numbered_row as row

MIB = 1 << 20
HERE = Path(__file__).parents[2]

COMMON = f"""
import sys
sys.path[:0] = [{str(HERE)!r}]
import numpy as np
from pathlib import Path
from offloading import hybrid, numbered_key as key, numbered_row as row
from kvstow.offload.disk.tier import DiskTier
"""


WRITER = COMMON + textwrap.dedent("""
    tier = DiskTier(Path(sys.argv[1]), hybrid(content=256), capacity=8 << 20)
    dice = np.random.default_rng(int(sys.argv[2]))
    print("ready", flush=True)
    while True:
        group = int(dice.integers(2))
        numbers = np.unique(dice.integers(0, 600, 24)).tolist()
        tier.store(group, [key(n) for n in numbers], [row(tier, group, n) for n in numbers])
        if dice.random() < 0.2:
            tier.evict(group, [key(n) for n in numbers[:4]])
""")

READER = COMMON + textwrap.dedent("""
    tier = DiskTier(Path(sys.argv[1]), hybrid(content=256))
    print("ready", flush=True)
    hits = 0
    for line in sys.stdin:
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
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        line = child.stdout.readline()
        assert line == "ready\n", child.stderr.read()
        yield child
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            pipe.close()


def store_all(tier, count, step):
    """Store so many rows of group 0, some at a time."""
    for start in range(0, count, step):
        numbers = range(start, start + step)
        tier.store(0, [key(n) for n in numbers], [row(tier, 0, n) for n in numbers])


def checked(tier):
    """Every row that the store serves is right; how many there are."""
    hits = 0
    for group in range(2):
        rows = [np.zeros(tier.layout.row_bytes(group), np.uint8) for _ in range(600)]
        found = tier.load(group, [key(n) for n in range(600)], rows)
        for n in np.flatnonzero(found).tolist():
            assert (rows[n] == row(tier, group, n)).all()
        hits += int(found.sum())
    return hits


def accounted(tier):
    """Every slot of every data file is a row, free, retired or leased by somebody alive."""
    listed = tier.index.ask("SELECT (SELECT COUNT(*) FROM rows) + (SELECT COUNT(*) FROM slots)")
    assert listed == tier.index.ask("SELECT SUM(slots) FROM segments")
    assert tier.index.ask("SELECT COUNT(*) FROM rows JOIN slots ON rows.place = slots.place") == [
        (0,)
    ]
    assert tier.index.ask(
        "SELECT COUNT(*) FROM slots WHERE owner > 0 AND owner NOT IN (SELECT id FROM owners)"
    ) == [(0,)]


# ── killed ────────────────────────────────────────────────────────────────────────────


def test_a_writer_killed_at_any_moment_never_leaves_a_wrong_row(tmp_path):
    dice = random.Random(7)
    survived, round_ = 0, 0
    while round_ < 6 or survived <= 100:
        round_ += 1
        with process(WRITER, tmp_path, round_) as writer:
            time.sleep(0.05 + dice.random() * 0.5)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        tier = DiskTier(tmp_path)
        survived += checked(tier)
        accounted(tier)
        assert tier.index.ask("SELECT COUNT(*) FROM slots WHERE owner > 0") == [(0,)]
        assert tier.counts.failures == 0
        tier.close()


def test_rows_are_right_while_two_processes_overflow_one_store_and_one_is_killed(tmp_path):
    with (
        process(WRITER, tmp_path, 1) as one,
        process(WRITER, tmp_path, 2),
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
            hits, failures = map(int, line.split())
    assert failures == 0
    tier = DiskTier(tmp_path)
    checked(tier)
    accounted(tier)
    tier.close()


def test_many_processes_may_make_one_store_at_the_same_time(tmp_path):
    make = COMMON + textwrap.dedent("""
        tier = DiskTier(Path(sys.argv[1]), hybrid(content=256), capacity=8 << 20)
        n = int(sys.argv[2])
        assert tier.store(0, [key(n)], [row(tier, 0, n)]).all()
        print("ready", flush=True)
        sys.stdin.read()
        tier.close()
    """)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", make, str(tmp_path), str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    for child in children:
        assert child.communicate("", timeout=120)[0] == "ready\n"
        assert child.returncode == 0
    tier = DiskTier(tmp_path)
    assert tier.contains(0, [key(n) for n in range(4)]).all()
    assert checked(tier) == 4
    tier.close()


# ── power ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(6))
def test_a_power_cut_between_write_and_sync_never_leaves_a_wrong_row(tmp_path, seed):
    class Cut(Exception):
        pass

    dice = random.Random(seed)
    files = FaultyFiles(keep_unsynced=True)
    tier = DiskTier(tmp_path, hybrid(content=256), capacity=2 * MIB, files=files)
    last = dice.randrange(3, 14)

    def fault(operation, count):
        if operation == "sync" and count >= last:
            raise Cut
        return

    files.fault = fault
    with pytest.raises(Cut):
        store_all(tier, 600, 12)
    assert files.cut(seed) > 0
    again = DiskTier(tmp_path)
    checked(again)
    assert again.counts.failures == 0  # what was not synced was never entered
    again.close()
    tier._open.close()


def test_a_disk_that_forgets_synced_data_is_found_out(tmp_path):
    """A drive that lies about flushing: rows are entered, their sectors are old."""

    class Lying(FaultyFiles):
        def sync(self, fd):
            pass

    files = Lying(keep_unsynced=True)
    tier = DiskTier(tmp_path, hybrid(content=256), capacity=2 * MIB, files=files)
    for start in range(0, 120, 12):
        numbers = range(start, start + 12)
        tier.store(0, [key(n) for n in numbers], [row(tier, 0, n) for n in numbers])
    tier.close()
    for segment, writes in _by_file(files, tmp_path).items():
        with open(segment, "r+b") as file:
            dice = random.Random(1)
            for offset, before in writes:
                for at in range(0, len(before), 4096):
                    if dice.random() < 0.3 and offset + at > 0:
                        file.seek(offset + at)
                        file.write(before[at : at + 4096].tobytes())
    again = DiskTier(tmp_path)
    kept = checked(again)
    assert kept < 120
    assert again.counts.failures > 0
    again.close()


def _by_file(files, path):
    """Unsynced writes of the first data file, newest first."""
    (segment, *_rest) = sorted(path.glob("segment-*.kv"))
    writes = [w for w in files.unsynced._writes if w.path == segment]
    assert writes
    return {segment: [(w.offset, w.before) for w in reversed(writes)]}


# ── flipped bytes ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(5))
def test_bytes_flipped_anywhere_in_the_data_files_never_make_a_wrong_row(tmp_path, seed):
    tier = DiskTier(tmp_path, hybrid(content=256), capacity=4 * MIB)
    for group in range(2):
        tier.store(group, [key(n) for n in range(60)], [row(tier, group, n) for n in range(60)])
    tier.close()
    dice = random.Random(seed)
    for segment in tmp_path.glob("segment-*.kv"):
        data = bytearray(segment.read_bytes())
        for _ in range(dice.randrange(1, 200)):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        segment.write_bytes(data)
    tier = DiskTier(tmp_path)
    kept = checked(tier)
    assert kept <= 120
    assert tier.counts.failures == 120 - kept
    accounted(tier)
    tier.close()


def test_a_damaged_index_gives_rows_or_misses_never_wrong_rows(tmp_path):
    dice = random.Random(3)
    for round_ in range(5):
        path = tmp_path / str(round_)
        tier = DiskTier(path, hybrid(content=256), capacity=4 * MIB)
        tier.store(0, [key(n) for n in range(60)], [row(tier, 0, n) for n in range(60)])
        tier.close()
        data = bytearray((path / "index.db").read_bytes())
        for _ in range(40):
            data[dice.randrange(100, len(data))] ^= 1 << dice.randrange(8)
        (path / "index.db").write_bytes(data)
        try:
            tier = DiskTier(path, capacity=4 * MIB)
            checked(tier)
        except StoreError:
            continue  # refused, in words
        tier.close()


# ── full ──────────────────────────────────────────────────────────────────────────────


@contextmanager
def tmpfs(path, nbytes):
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no small tmpfs for a full disk: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def filled(path):
    """A file that takes all that is left of a file system."""
    ballast = path / "ballast"
    file = os.open(ballast, os.O_CREAT | os.O_WRONLY)
    with suppress(OSError):
        while True:
            os.write(file, bytes(4096))
    os.close(file)
    return ballast


def test_a_full_disk_keeps_what_fits_and_serves_it_and_says_so_once(tmp_path, caplog):
    with tmpfs(tmp_path / "small", 3 * MIB):
        path = tmp_path / "small"
        tier = DiskTier(path / "store", hybrid(content=256), capacity=4 * MIB)
        for start in range(0, 300, 20):
            numbers = range(start, start + 20)
            tier.store(0, [key(n) for n in numbers], [row(tier, 0, n) for n in numbers])
        kept = checked(tier)
        assert 0 < kept < 300
        assert tier.usage.nbytes <= 3 * MIB
        said = [each for each in caplog.messages if "no space for another data file" in each]
        assert len(said) == 1
        accounted(tier)
        tier.close()
        tier = DiskTier(path / "store")
        assert checked(tier) == kept
        tier.close()


def test_a_disk_with_no_room_for_the_index_fails_the_call_and_goes_on_later(tmp_path):
    with tmpfs(tmp_path / "small", 2 * MIB):
        path = tmp_path / "small"
        tier = DiskTier(path / "store", hybrid(), capacity=MIB)
        tier.store(0, [key(1)], [row(tier, 0, 1)])
        ballast = filled(path)
        messages = []
        for n in range(2, 200):
            try:
                tier.store(0, [key(n)], [row(tier, 0, n)])
            except StoreError as error:
                messages.append(str(error))
        assert messages
        assert all("full" in message for message in messages)
        checked(tier)
        ballast.unlink()
        assert tier.store(0, [key(700)], [row(tier, 0, 700)]).all()
        checked(tier)
        tier.close()


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_rows_that_could_not_be_given_up_on_a_full_disk_are_given_up_when_it_is_not(
    tmp_path, policy
):
    with tmpfs(tmp_path / "small", 12 * MIB):
        path = tmp_path / "small"
        tier = DiskTier(path / "store", hybrid(content=256), capacity=MIB, policy=policy)
        store_all(tier, 100, 1)
        ballast, refused = filled(path), 0
        for n in range(100, 400):
            try:
                tier.store(0, [key(n)], [row(tier, 0, n)])
            except StoreError:
                refused += 1
        assert refused
        ballast.unlink()
        for n in range(400, 500):
            assert tier.store(0, [key(n)], [row(tier, 0, n)]).all()
        accounted(tier)
        tier.close()


def test_slots_that_a_full_disk_kept_from_being_given_back_are_given_back_later(tmp_path):
    with tmpfs(tmp_path / "small", 4 * MIB):
        path, is_filling = tmp_path / "small", []

        def fill(operation, count):
            if operation == "sync" and is_filling:  # rows are written, and not entered yet
                filled(path)

        files = FaultyFiles(fill)
        tier = DiskTier(path / "store", hybrid(), capacity=MIB, files=files, threads=0)
        tier.store(0, [key(1)], [row(tier, 0, 1)])
        is_filling.append(1)
        with pytest.raises(StoreError, match="full"):
            tier.store(0, [key(n) for n in range(2, 9)], [row(tier, 0, n) for n in range(2, 9)])
        assert tier.counts.stored_rows == 1
        leased = "SELECT COUNT(*) FROM slots WHERE owner > 0"
        assert tier.index.ask(leased) == [(7,)]
        is_filling.clear()
        (path / "ballast").unlink()
        assert tier.store(0, [key(9)], [row(tier, 0, 9)]).all()
        assert tier.index.ask(leased) == [(0,)]
        tier.close()


def test_a_store_on_a_full_disk_can_be_closed(tmp_path, caplog):
    with tmpfs(tmp_path / "small", 4 * MIB):
        path = tmp_path / "small"
        tier = DiskTier(path / "store", hybrid(), capacity=MIB)
        store_all(tier, 20, 20)
        ballast = filled(path)
        assert checked(tier) == 20
        tier.close()
        assert "not written down" in caplog.text
        ballast.unlink()
        tier = DiskTier(path / "store")
        assert checked(tier) == 20
        tier.close()


def test_an_interrupted_load_ends_when_nothing_writes_to_its_rows_any_more(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    store_all(tier, 8, 8)
    tier.close()
    begun, may_end, ended = threading.Event(), threading.Event(), []

    class Slow(Files):
        def read(self, fd, parts, offset):
            if offset and threading.current_thread() is not threading.main_thread():
                begun.set()
                may_end.wait(10)
                ended.append(1)
            return super().read(fd, parts, offset)

    def interrupt():
        begun.wait(10)
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


# ── missing ───────────────────────────────────────────────────────────────────────────


def test_files_removed_under_a_running_process_cost_rows_only(tmp_path):
    tier = DiskTier(tmp_path, hybrid(content=256), capacity=4 * MIB)
    other = DiskTier(tmp_path)
    tier.store(0, [key(n) for n in range(100)], [row(tier, 0, n) for n in range(100)])
    for segment in sorted(tmp_path.glob("segment-*.kv"))[::2]:
        segment.unlink()
    kept = checked(other)
    assert kept < 100
    other.close()
    tier.close()
    healed = DiskTier(tmp_path)
    assert checked(healed) <= kept
    accounted(healed)
    assert healed.store(
        0, [key(n) for n in range(100)], [row(healed, 0, n) for n in range(100)]
    ).all()
    healed.close()


def test_a_store_whose_layout_file_is_gone_needs_the_layout_again(tmp_path):
    layout = hybrid(content=256)
    tier = DiskTier(tmp_path, layout, capacity=4 * MIB)
    tier.store(0, [key(1)], [row(tier, 0, 1)])
    tier.close()
    (tmp_path / "layout.json").unlink()
    with pytest.raises(StoreError, match=r"layout\.json is missing"):
        DiskTier(tmp_path)
    tier = DiskTier(tmp_path, layout)
    assert checked(tier) == 1
    tier.close()


def test_another_layout_does_not_slip_in_through_a_missing_layout_file(tmp_path):
    tier = DiskTier(tmp_path, hybrid(content=256), capacity=4 * MIB)
    tier.store(0, [key(1)], [row(tier, 0, 1)])
    tier.close()
    (tmp_path / "layout.json").unlink()
    with pytest.raises(StoreError, match="another layout"):
        DiskTier(tmp_path, hybrid(content=128), capacity=4 * MIB)


def test_a_write_error_in_the_middle_of_many_parts_gives_every_slot_back(tmp_path):
    files = FaultyFiles()
    tier = DiskTier(tmp_path, hybrid(content=256), capacity=8 * MIB, files=files)
    files.fault = lambda op, n: Fails() if op == "write" and n == 5 else None
    with pytest.raises(StoreError, match="not written"):
        store_all(tier, 300, 50)
    files.fault = lambda op, n: None
    assert tier.index.ask("SELECT COUNT(*) FROM slots WHERE owner > 0") == [(0,)]
    checked(tier)
    accounted(tier)
    tier.close()
