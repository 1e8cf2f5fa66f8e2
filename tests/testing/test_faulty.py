"""Files that fail on purpose: what a power cut takes back, and what it must not."""

import errno

import pytest

from kvstow.offload.disk.files import BLOCK, aligned
from kvstow.testing.faulty import Fails, FaultyFiles, Unsynced


def block(value):
    memory = aligned(BLOCK)
    memory[:] = value
    return memory


def made(files, path, value=1):
    fd = files.open(path, create=True)
    files.allocate(fd, 0, 2 * BLOCK)
    files.write(fd, [block(value)], 0)
    return fd


def outcomes(tmp_path, steps):
    """What is left of a file after a power cut, for many seeds: its bytes, or None."""
    found = set()
    for seed in range(40):
        path = tmp_path / f"{seed}.kv"
        files = FaultyFiles(keep_unsynced=True)
        steps(files, path)
        files.cut(seed)
        found.add(path.read_bytes() if path.exists() else None)
    return found


OLD, NEW = bytes(2 * BLOCK), b"\1" * BLOCK + bytes(BLOCK)


def test_a_name_that_was_not_synced_may_be_gone(tmp_path):
    def steps(files, path):
        files.sync(made(files, path))

    assert outcomes(tmp_path, steps) == {None, NEW}


def test_a_name_that_was_synced_stays(tmp_path):
    def steps(files, path):
        files.sync(made(files, path))
        files.sync_directory(tmp_path)

    assert outcomes(tmp_path, steps) == {NEW}


def test_bytes_and_length_that_were_not_synced_may_be_as_before(tmp_path):
    def steps(files, path):
        made(files, path)
        files.sync_directory(tmp_path)

    assert outcomes(tmp_path, steps) == {b"", OLD, NEW}


def test_a_file_that_was_removed_may_be_back_until_the_directory_is_synced(tmp_path):
    def removed(files, path):
        files.sync(made(files, path))
        files.sync_directory(path.parent)
        files.remove(path)

    def removed_and_synced(files, path):
        removed(files, path)
        files.sync_directory(path.parent)

    assert outcomes(tmp_path, removed) == {None, NEW}
    (tmp_path / "other").mkdir()
    assert outcomes(tmp_path / "other", removed_and_synced) == {None}


def test_a_sync_of_one_process_is_good_for_the_writes_of_another(tmp_path):
    disk = Unsynced()
    writer, other = FaultyFiles(unsynced=disk), FaultyFiles(unsynced=disk)
    made(writer, tmp_path / "shared.kv")
    fd = other.open(tmp_path / "shared.kv")
    other.sync(fd)
    other.sync_directory(tmp_path)
    assert disk.cut(1) == 0
    assert (tmp_path / "shared.kv").read_bytes() == NEW


@pytest.mark.parametrize("operation", ["sync_directory", "remove"])
def test_names_cannot_be_synced_or_removed_where_that_fails(tmp_path, operation):
    files = FaultyFiles(
        lambda op, n: Fails(errno.EIO) if op == operation else None, keep_unsynced=True
    )
    files.sync(made(files, tmp_path / "a.kv"))
    with pytest.raises(OSError, match="Input/output"):
        files.sync_directory(tmp_path) if operation == "sync_directory" else files.remove(
            tmp_path / "a.kv"
        )
    assert (tmp_path / "a.kv").exists()
    assert files.cut(3) + files.cut(3) <= 1  # the name, once
