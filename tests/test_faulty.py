"""Files that fail on purpose: what a power cut takes back, and what it must not."""

import errno

import pytest

from faulty import Fails, FaultyFiles, Unsynced
from kvstow.offload.disk.files import BLOCK, aligned


def made(files, path, value=1):
    """A file of two blocks; its name."""
    memory = aligned(2 * BLOCK)
    memory[:] = value
    fd = files.create(str(path))
    files.write(fd, [memory])
    files.close(fd)
    return str(path)


def outcomes(tmp_path, steps):
    """What is left of a file after a power cut, for many seeds: its blocks, or None."""
    found = set()
    for seed in range(60):
        path = tmp_path / f"{seed}.kv"
        files = FaultyFiles(keep_unsynced=True)
        steps(files, path)
        files.cut(seed)
        data = path.read_bytes() if path.exists() else None
        found.add(data if data is None else (data[:BLOCK], data[BLOCK:]))
    return found


NEW, LOST = b"\1" * BLOCK, bytes(BLOCK)


def named(files, path, *, is_synced):
    temporary = made(files, f"{path}.new")
    if is_synced:
        files.sync([temporary])
    files.rename(temporary, str(path))


def test_a_name_that_was_not_synced_may_be_gone_and_a_synced_file_is_whole(tmp_path):
    def steps(files, path):
        named(files, path, is_synced=True)

    assert outcomes(tmp_path, steps) == {None, (NEW, NEW)}


def test_what_is_synced_with_others_stays_with_its_name(tmp_path):
    def steps(files, path):
        named(files, path, is_synced=False)
        files.sync([str(path), made(files, f"{path}.other")])

    assert outcomes(tmp_path, steps) == {(NEW, NEW)}


def test_bytes_and_length_that_were_not_synced_may_be_lost(tmp_path):
    def steps(files, path):
        named(files, path, is_synced=False)

    found = outcomes(tmp_path, steps)
    assert {None, (NEW, NEW), (LOST, NEW), (NEW, LOST), (LOST, LOST)} <= found
    assert any(each is not None and len(each[0] + each[1]) < 2 * BLOCK for each in found)


def test_a_file_that_was_removed_may_be_back_until_names_are_synced(tmp_path):
    def removed(files, path):
        files.sync([made(files, path), made(files, f"{path}.other")])
        files.remove(str(path))

    def removed_and_synced(files, path):
        removed(files, path)
        files.sync([made(files, f"{path}.1"), made(files, f"{path}.2")])

    assert outcomes(tmp_path, removed) == {None, (NEW, NEW)}
    (tmp_path / "other").mkdir()
    assert outcomes(tmp_path / "other", removed_and_synced) == {None}


def test_a_sync_of_one_process_is_good_for_the_writes_of_another(tmp_path):
    disk = Unsynced()
    writer, other = FaultyFiles(unsynced=disk), FaultyFiles(unsynced=disk)
    names = [made(writer, tmp_path / name) for name in ("one.kv", "two.kv")]
    other.sync(names)
    assert disk.cut(1) == 0
    assert (tmp_path / "one.kv").read_bytes() == NEW + NEW


@pytest.mark.parametrize("operation", ["sync", "remove", "rename", "link"])
def test_an_operation_that_fails_has_not_happened(tmp_path, operation):
    files = FaultyFiles(lambda op, n: Fails(errno.EIO) if op == operation else None)
    name = made(files, tmp_path / "a.kv")
    calls = {
        "sync": lambda: files.sync([name]),
        "remove": lambda: files.remove(name),
        "rename": lambda: files.rename(name, f"{name}.b"),
        "link": lambda: files.link(name, f"{name}.b"),
    }
    with pytest.raises(OSError, match="Input/output"):
        calls[operation]()
    assert [file.name for file in tmp_path.iterdir()] == ["a.kv"]
