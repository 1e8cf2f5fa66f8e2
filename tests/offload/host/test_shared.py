"""A host tier in shared memory: what the next process finds, and what its neighbours read."""

import errno
import os
import platform
import threading
import time
import uuid
from dataclasses import replace

import numpy as np
import pytest

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import LoadBlocks, LookUpKeys, StoreBlocks
from kvstow.adapters.vllm.worker.tiers import WorkerTiers
from kvstow.errors import ArenaError, StoreError
from kvstow.memory.allocate import shared_path
from kvstow.memory.arena import Arena
from kvstow.offload.host import processes as near
from kvstow.offload.host.processes import SharedReader, SharedTiers, shared_readers
from kvstow.offload.host.shared import check_order, parts, remove
from kvstow.offload.host.tier import HostTier
from kvstow.offload.mover.mover import Mover
from offloading import IDENTITY, hybrid, key, random_rows, row_bytes

KIB = 1 << 10

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="shared host tiers need x86-64"
)


@pytest.fixture
def name(monkeypatch):
    monkeypatch.setattr(near, "LOOK_SECONDS", 0.0)
    name = f"kvstow-test-{uuid.uuid4().hex[:12]}"
    yield name
    remove(name)
    assert not list(parts(name)), "somebody still writes a part"


def tier_of(name, **options):
    return HostTier(hybrid(), capacity=options.pop("capacity", 64 * KIB), shared=name, **options)


def content(group, number, nbytes):
    return random_rows(nbytes, 1, 1000 * group + number)[0]


def stored(tier, group, numbers):
    keys = [key(group, n) for n in numbers]
    rows = [content(group, n, tier.layout.row_bytes(group)) for n in numbers]
    return keys, tier.store(group, keys, rows)


def found(tier, group, numbers):
    """Which rows a tier returns, once each is known to be the right one."""
    nbytes = tier.layout.row_bytes(group)
    rows = [np.full(nbytes, 0xEE, np.uint8) for _ in numbers]
    mask = tier.load(group, [key(group, n) for n in numbers], rows)
    for n, row, ok in zip(numbers, rows, mask, strict=True):
        assert not ok or (row == content(group, n, nbytes)).all(), f"another row than {n}"
    return mask


def test_the_next_process_finds_the_rows_of_the_last(name):
    first = tier_of(name)
    stored(first, 0, range(8))
    stored(first, 1, range(5))
    first.close()
    second = tier_of(name)
    assert second.part == f"{name}.0"
    assert second.usage.rows == 13
    assert found(second, 0, range(9)).tolist() == [True] * 8 + [False]
    assert found(second, 1, range(5)).all()
    second.check()
    second.close()


def test_ages_outlive_a_process(name):
    first = tier_of(name)
    keys, kept = stored(first, 0, range(400))
    room = int(kept.sum())
    assert room < 400
    first.close()
    second = tier_of(name)
    stored(second, 0, range(1000, 1000 + room // 2))
    left = second.contains(0, keys[:room])
    assert left[room - room // 2 :].all()  # the young half
    assert not left[: room // 2].any()
    second.check()
    second.close()


def test_rows_that_were_being_filled_are_nobodys_after_a_restart(name):
    first = tier_of(name)
    stored(first, 0, range(3))
    first.reserve(0, [key(0, 100), key(0, 101)])
    first.close()
    second = tier_of(name)
    assert second.usage.rows == 3
    stored(second, 0, range(3, 9))
    assert found(second, 0, range(9)).all()
    second.check()
    second.close()


def test_two_processes_of_one_layout_write_two_parts_and_read_each_other(name):
    one, other = tier_of(name), tier_of(name)
    assert [one.part, other.part] == [f"{name}.0", f"{name}.1"]
    beside = SharedTiers(other)
    stored(one, 0, range(6))
    assert beside.contains(0, [key(0, n) for n in range(8)]).tolist() == [True] * 6 + [False] * 2
    assert found(beside, 0, range(8)).tolist() == [True] * 6 + [False] * 2
    one.evict(0, [key(0, 2)])
    assert found(beside, 0, range(6)).tolist() == [True, True, False, True, True, True]
    stored(one, 1, range(3))
    assert found(beside, 1, range(4)).tolist() == [True] * 3 + [False]
    assert beside.usage.rows == 8
    for tier in (one, other, beside):
        tier.close()


def test_a_reader_that_fell_behind_the_log_looks_at_everything_again(name):
    writer = tier_of(name, capacity=16 * KIB)
    reader = SharedReader(writer.part)
    assert not reader.contains(0, [b"x"]).any()
    for start in range(0, 6000, 10):
        stored(writer, 0, range(start, start + 10))
    kept = writer.contains(0, [key(0, n) for n in range(6000)])
    assert (reader.contains(0, [key(0, n) for n in range(6000)]) == kept).all()
    assert (found(reader, 0, range(5900, 6000)) == kept[5900:]).all()
    writer.close()
    reader.close()


def test_a_row_given_up_between_the_two_looks_is_a_miss(name, monkeypatch):
    writer = tier_of(name)
    reader = SharedReader(writer.part)
    stored(writer, 0, range(4))
    assert reader.contains(0, [key(0, 1)]).all()
    look = near.key_table

    def late(keys):  # between the first look at seq and the copy
        table = look(keys)
        writer.evict(0, [key(0, 1)])
        stored(writer, 0, [77])
        return table

    monkeypatch.setattr(near, "key_table", late)
    assert found(reader, 0, range(4)).tolist() == [True, False, True, True]
    writer.close()
    reader.close()


def test_a_reader_with_an_old_idea_of_where_rows_are_serves_none_of_others(name, monkeypatch):
    writer = tier_of(name)
    reader = SharedReader(writer.part)
    stored(writer, 0, range(4))
    assert reader.contains(0, [key(0, n) for n in range(4)]).all()
    monkeypatch.setattr(reader, "_look", lambda: None)  # it learns nothing more
    writer.evict(0, [key(0, n) for n in range(4)])
    stored(writer, 0, range(50, 54))  # the same rows
    assert not found(reader, 0, range(4)).any()
    writer.close()
    reader.close()


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_readers_never_see_another_row_while_a_writer_evicts(name, policy):
    writer = tier_of(name, capacity=24 * KIB, policy=policy)
    reader = SharedReader(writer.part)
    stop = threading.Event()

    def write():
        dice = np.random.default_rng(1)
        while not stop.is_set():
            group = int(dice.integers(2))
            stored(writer, group, np.unique(dice.integers(0, 60, 8)).tolist())

    thread = threading.Thread(target=write)
    thread.start()
    dice, hits, rounds = np.random.default_rng(2), 0, 0
    until = time.monotonic() + 20.0
    try:
        while rounds < 150 or (not hits and time.monotonic() < until):
            group = int(dice.integers(2))
            hits += int(found(reader, group, np.unique(dice.integers(0, 60, 12)).tolist()).sum())
            rounds += 1
    finally:
        stop.set()
        thread.join()
    assert hits
    writer.check()
    writer.close()
    reader.close()


def test_a_mover_brings_rows_of_neighbours_to_its_own_blocks(name):
    one, other = tier_of(name), tier_of(name)
    layout = hybrid()
    arena = Arena(layout)
    beside = SharedTiers(other)
    mover = Mover(arena, other, beside)
    stored(one, 1, range(3))
    ids = np.arange(3) + layout.groups[1].rows_per_slab
    assert mover.load(1, [key(1, n) for n in range(3)], ids).result(20).all()
    nbytes = one.layout.row_bytes(1)
    for n, block in enumerate(ids):
        got = row_bytes(layout, 1, int(block), arena.bytes.numpy())
        assert (got == content(1, n, nbytes)[: len(got)]).all()
    mover.close()
    for tier in (one, other, beside):
        tier.close()


def test_a_worker_restores_what_another_worker_has_stored(name):
    layout = hybrid()
    arenas = [Arena(layout), Arena(layout)]
    arenas[0].bytes.random_(0, 256)
    settings = ConnectorOptions(host_bytes=64 * KIB, host_shared=name)
    one, other = (WorkerTiers(arena, settings) for arena in arenas)
    ids, keys = [3, 4, 5], tuple(key(0, n) for n in range(3))
    one.store(StoreBlocks(job=1, rows={0: (keys, ids)}))
    assert waited(one.stored)
    other.look_up(LookUpKeys(request="b", keys=(keys, ())))
    assert [answer.present for answer in other.answers()] == [((True,) * 3, ())]
    other.load(LoadBlocks(request="b", rows={0: (keys, ids)}, num_tokens=12))
    (job,) = waited(other.loaded)
    assert job.error is None
    for block in ids:
        rows = [row_bytes(layout, 0, block, arena.bytes.numpy()) for arena in arenas]
        assert (rows[0] == rows[1]).all()
    one.close()
    other.close()


def waited(ended):
    """What has ended, once something has."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if jobs := ended():
            return jobs
        time.sleep(0.01)
    raise AssertionError("nothing ended")


def test_parts_of_other_rows_are_no_neighbours_but_can_be_read_as_they_are(name):
    one = tier_of(name)
    other = HostTier(hybrid(content=16), capacity=64 * KIB, shared=name)
    stored(other, 0, range(2))
    beside = SharedTiers(one)
    assert not beside.contains(0, [key(0, 0)]).any()
    both = shared_readers(name)
    assert [len(part.layout.groups) for part in both] == [2, 2]
    assert found(both[1], 0, range(2)).all()
    for tier in (one, other, beside, *both):
        tier.close()


def test_a_shared_index_that_was_never_finished_is_made_again(name):
    shared_path(f"{name}.0.index").write_bytes(b"\0" * 5000)
    shared_path(f"{name}.0.index").chmod(0o600)
    tier = tier_of(name)
    assert tier.part == f"{name}.0"
    stored(tier, 0, range(2))
    assert found(tier, 0, range(2)).all()
    tier.close()


@pytest.mark.parametrize("damage", ["manifest", "count", "magic"])
def test_a_shared_index_that_cannot_be_read_bars_nobody(name, damage):
    tier = tier_of(name)
    tier.close()
    path = shared_path(f"{name}.0.index")
    data = bytearray(path.read_bytes())
    match damage:
        case "manifest":
            data[4096:4106] = b"?" * 10
        case "count":
            data[8:16] = (1 << 40).to_bytes(8, "little")
        case "magic":
            data[:8] = b"kvstowB9"
    path.write_bytes(data)
    tier = tier_of(name)
    stored(tier, 0, range(2))
    assert found(tier, 0, range(2)).all()
    beside = SharedTiers(tier)
    assert not beside.contains(0, [key(0, 0)]).any()
    assert len(shared_readers(name)) == 1
    for one in (tier, beside):
        one.close()
    assert path.read_bytes() == data  # perhaps a newer version's
    path.unlink()


@pytest.mark.parametrize("plant", ["link", "mode", "second name"])
def test_planted_shared_memory_is_left_alone(name, plant, tmp_path):
    path, target = shared_path(f"{name}.0.index"), tmp_path / "target"
    target.write_bytes(b"mine")
    target.chmod(0o600)
    match plant:
        case "link":
            path.symlink_to(target)
        case "mode":
            path.write_bytes(b"mine")
            path.chmod(0o666)
        case "second name":
            path.write_bytes(b"mine")
            path.chmod(0o600)
            os.link(path, path.with_suffix(".other"))
    try:
        tier = tier_of(name)
        assert tier.part == f"{name}.1"
        assert path.read_bytes() == target.read_bytes() == b"mine"
        with pytest.raises(ArenaError):
            SharedReader(f"{name}.0")
        tier.close()
    finally:
        path.unlink()
        path.with_suffix(".other").unlink(missing_ok=True)


def test_rows_of_another_computation_are_not_read(name):
    one = tier_of(name)
    layout = hybrid().identified(replace(IDENTITY, weights="02" * 16))
    other = HostTier(layout, capacity=64 * KIB, shared=name)
    assert {one.part, other.part} == {f"{name}.0", f"{name}.1"}
    stored(other, 0, range(2))
    beside = SharedTiers(one)
    assert not beside.contains(0, [key(0, 0)]).any()
    for tier in (one, other, beside):
        tier.close()
    with pytest.raises(StoreError, match="which computation"):
        HostTier(replace(layout, identity=None), capacity=64 * KIB, shared=name)


def test_a_part_that_somebody_writes_is_not_removed(name):
    tier = tier_of(name)
    assert remove(name) == 0
    tier.close()
    assert remove(name) == 1
    assert not [file for file in os.listdir("/dev/shm") if file.startswith(name)]


def test_a_reader_of_a_removed_part_keeps_its_rows_and_is_told(name):
    tier = tier_of(name)
    stored(tier, 0, range(2))
    reader = SharedReader(tier.part)
    tier.close()
    remove(name)
    assert reader.gone
    assert found(reader, 0, range(2)).all()
    reader.close()


def test_what_cannot_be_shared_is_refused(name):
    with pytest.raises(StoreError, match="not shared"):
        SharedTiers(HostTier(hybrid(), capacity=64 * KIB))
    with pytest.raises(StoreError, match="memory order of x86-64"):
        check_order("aarch64")
    with pytest.raises(StoreError, match="must have room"):
        tier_of(name, capacity=1 << 44)
    assert not [file for file in os.listdir("/dev/shm") if file.startswith(name)]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EMFILE, errno.ENOSPC])
def test_a_folder_in_which_no_file_can_be_made_is_an_error(name, monkeypatch, number):
    opened, refused = os.open, []

    def refusing(path, flags, *mode, **options):
        if flags & os.O_CREAT and name in str(path):
            refused.append(path)
            assert len(refused) < 10, "it tries for ever"
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(StoreError, match=os.strerror(number)) as caught:
        tier_of(name)
    assert "hint:" in str(caught.value)
