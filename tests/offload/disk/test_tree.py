"""Names of row files, writers and what they leave, listings of what came and went."""

import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstow.offload.disk import tree as disk_tree
from kvstow.offload.disk.files import Files
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.disk.tree import RowListing, Writers, _is_locked_now, walk
from offloading import hybrid, numbered_key, numbered_row, row_files

MIB = 1 << 20


def stored(tier, numbers, group=0):
    keys = [numbered_key(n) for n in numbers]
    assert tier.store(group, keys, [numbered_row(tier, group, n) for n in numbers]).all()
    return keys


def test_what_a_dead_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    living = Writers(tmp_path, Files())
    mine = Path(living.next_file())
    mine.write_bytes(b"half")
    code = (
        "import os, sys; from pathlib import Path; from kvstow.offload.disk.files import Files\n"
        "from kvstow.offload.disk.tree import Writers\n"
        "writers = Writers(Path(sys.argv[1]), Files())\n"
        "for _ in range(3): Path(writers.next_file()).write_bytes(b'half')\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 9
    other = Writers(tmp_path, Files())
    assert other.count() == 3
    other.sweep()
    assert other.count() == 2
    assert mine.exists()
    living.close()  # with a file in it
    other.sweep()
    assert other.count() == 1
    other.close()
    assert os.listdir(tmp_path / "new") == []


def test_a_folder_goes_while_nobody_can_begin_to_write_in_it(tmp_path, monkeypatch):
    writers, rmdir, was_locked = Writers(tmp_path, Files()), os.rmdir, []

    def look(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        was_locked.append(not _is_locked_now(fd))
        os.close(fd)
        rmdir(folder)

    assert writers.count() == 1
    (tmp_path / "new" / "4711-dead").mkdir()
    monkeypatch.setattr(os, "rmdir", look)
    writers.sweep()
    assert (was_locked, writers.count()) == ([True], 1)
    writers.close()


def test_bytes_that_were_reserved_and_not_written_are_free_without_another_look(
    tmp_path, monkeypatch
):
    tree = DiskTier(tmp_path, hybrid(), capacity=MIB).tree
    assert tree.reserve(MIB)
    assert not tree.reserve(1)
    tree.give_back(MIB)
    assert tree.reserve(MIB // 2)
    tree.give_back(MIB // 2)
    monkeypatch.setattr(tree, "_walked", lambda: pytest.fail("looked again"))
    assert tree.reserve(MIB)


def test_a_walk_counts_a_file_once_whatever_its_names(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    stored(tier, range(20))
    stored(tier, range(20, 30))
    stored(tier, range(7), group=1)
    files = [file for root in tmp_path.glob("rows-*") for file in walk(str(root))]
    assert sorted((file.group, len(file.keys)) for file in files) == [(0, 10), (0, 20), (1, 7)]
    assert sum(file.nbytes for file in files) == tier.usage.nbytes
    tier.close()


def test_the_usage_costs_a_walk_only_fifty_walks_after_the_last_one(tmp_path, monkeypatch):
    tree = DiskTier(tmp_path, hybrid(), capacity=MIB).tree
    monkeypatch.setattr(disk_tree, "time", SimpleNamespace(monotonic=count().__next__))
    monkeypatch.setattr(disk_tree, "walk", lambda root: walks.append(root) or [])
    (tmp_path / "rows-0").mkdir()
    walks = []  # each takes a second, as does a look at the usage
    looks = [len(walks) for _ in range(150) if tree.usage]
    assert [looks.count(n) for n in (1, 2)] == [50, 50]


def test_a_listing_tells_what_came_and_went_whoever_did_it(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    other = DiskTier(tmp_path)
    listing = RowListing(tier.tree, 0)
    assert listing.look() == ([], [])
    keys = stored(other, range(300))
    came, gone = listing.look()
    assert (sorted(came), gone) == (sorted(keys), [])
    assert listing.look() == ([], [])
    other.evict(0, keys[:100])
    new = stored(tier, range(300, 310))
    came, gone = listing.look()
    assert (sorted(came), sorted(gone)) == (sorted(new), sorted(keys[:100]))
    for each in (tier, other):
        each.close()


def test_a_listing_looks_again_only_where_something_has_changed(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    stored(tier, range(100))
    long_ago = time.time() - 100
    for directory in tier.tree.directories(0):
        os.utime(directory.path, (long_ago, long_ago))
    listing = RowListing(tier.tree, 0)
    assert len(listing.look()[0]) == 100
    listed = []
    monkeypatch.setattr("kvstow.offload.disk.tree.keys_in", listed.append)
    assert listing.look() == ([], [])
    assert listed == []
    tier.close()


def test_what_one_of_two_writers_evicts_is_not_counted_as_free_twice(tmp_path):
    """Each keeps no more than its part of what both leave alone, whatever it has freed."""
    capacity = 320 << 10
    one, other = (DiskTier(tmp_path, hybrid(), capacity=capacity) for _ in range(2))

    def store(tier, first, num_files):
        for n in range(first, first + 9 * num_files, 9):
            stored(tier, range(n, n + 9))
            sizes = {file.stat().st_ino: file.stat().st_size for file in row_files(tmp_path)}
            assert sum(sizes.values()) <= capacity

    store(one, 0, 20)
    store(other, 1000, 1)
    store(one, 2000, 1)
    assert one.evict(0, [numbered_key(n) for n in range(180)]) > 90
    store(other, 3000, 40)
    store(one, 4000, 20)
    one.close()
    other.close()
