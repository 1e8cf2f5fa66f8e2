"""Rows that were damaged in host memory are found when they come back."""

from pathlib import Path

import pytest
import torch

from kvstow.memory.arena import Arena
from kvstow.memory.kernels.sums import sum_rows
from kvstow.offload.copies.checks import weighted_sum
from kvstow.offload.copies.mover import Limits, Mover
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.tier import HostTier
from kvstow.plan.layout import Order
from offloading import hybrid, key, numbered_row, row_bytes

STEPWISE = Limits(workers=0)


def made(order: Order = "BLHNC", folder: Path | None = None) -> tuple[Arena, HostTier, Mover]:
    layout = hybrid(order=order, num_slabs=12)
    arena = Arena(layout)
    arena.bytes.copy_(torch.arange(arena.nbytes) % 251)
    disk = DiskTier(folder, layout, capacity=1 << 24, threads=0) if folder else None
    host = HostTier(disk.layout if disk else layout, capacity=1 << 20)
    return arena, host, Mover(arena, host, *filter(None, [disk]), limits=STEPWISE, checked=True)


def stored(mover: Mover, group: int, ids: list[int]) -> list[bytes]:
    keys = [key(group, n) for n in ids]
    job = mover.store(group, ids, keys, here=True)
    assert job.over
    assert job.moved.all()
    return keys


def damage(host: HostTier, group: int, which: bytes, at: int = 5) -> None:
    with host.held(group, [which]) as (_, rows):
        host.views(group, rows)[0][at] ^= 1


@pytest.mark.parametrize("order", ["BLHNC", "LBHNC"])
@pytest.mark.parametrize("here", [True, False])
def test_a_row_with_one_changed_bit_is_not_loaded_and_the_others_are(order: Order, here: bool):
    arena, host, mover = made(order)
    keys = stored(mover, 0, [3, 4, 5])
    before = [row_bytes(arena.layout, 0, block, arena.bytes.numpy()) for block in (3, 4, 5)]
    damage(host, 0, keys[1])
    job = mover.load(0, keys, [6, 7, 8], here=here)
    assert job.over == here
    mover.drain()
    assert job.moved.tolist() == [True, False, True]
    assert job.num_damaged == 1
    assert host.counts.failures == 1
    assert host.contains(0, keys).tolist() == [True, False, True]
    for block, row in ((6, before[0]), (8, before[2])):
        assert (row_bytes(arena.layout, 0, block, arena.bytes.numpy()) == row).all()
    host.check()


def test_a_damaged_row_comes_from_the_tier_below(tmp_path: Path):
    arena, host, mover = made(folder=tmp_path)
    keys = stored(mover, 0, [3, 4])
    mover.drain()
    before = row_bytes(arena.layout, 0, 3, arena.bytes.numpy())
    damage(host, 0, keys[0])
    job = mover.load(0, keys, [6, 7])
    mover.drain()
    assert job.moved.all()
    assert job.num_damaged == 1
    assert (row_bytes(arena.layout, 0, 6, arena.bytes.numpy()) == before).all()


@pytest.mark.parametrize("order", ["BLHNC", "LBHNC"])
@pytest.mark.parametrize("group", [0, 1])
def test_a_row_that_was_damaged_in_host_memory_does_not_go_on_to_the_disk(
    tmp_path: Path, order: Order, group: int
):
    _, host, mover = made(order, tmp_path)
    keys = stored(mover, group, [3, 4])
    damage(host, group, keys[1])
    mover.drain()  # what was stored goes on
    assert host.contains(group, keys).tolist() == [True, False]
    assert host.counts.failures == 1
    disk = DiskTier(tmp_path, threads=0)
    assert disk.contains(group, keys).tolist() == [True, False]
    disk.close()


def test_a_row_that_came_from_below_is_not_compared_with_one_that_left_before(tmp_path: Path):
    """Another instance has stored the same tokens first, with bytes that differ by rounding."""
    arena, host, mover = made(folder=tmp_path)
    theirs = numbered_row(host, 0, 3)
    disk = DiskTier(tmp_path, threads=0)
    disk.store(0, [key(0, 3)], [theirs])
    disk.close()
    keys = stored(mover, 0, [3])
    mover.drain()
    host.evict(0, keys)
    for _ in range(2):  # from the disk, then from host memory
        job = mover.load(0, keys, [6])
        mover.drain()
        assert job.moved.all()
        assert job.num_damaged == 0
    assert (row_bytes(arena.layout, 0, 6, arena.bytes.numpy()) == theirs).all()
    assert host.contains(0, keys).all()
    assert host.counts.failures == 0


@pytest.mark.parametrize("order", ["BLHNC", "LBHNC"])
def test_nothing_to_copy_is_no_error(order: Order):
    """Rows that the host has are not stored again; rows that it has not are not loaded."""
    _, host, mover = made(order)
    keys = stored(mover, 0, [3])
    assert stored(mover, 0, [3]) == keys
    job = mover.load(0, [key(0, 99)], [6], here=True)
    mover.drain()
    assert job.over
    assert job.error is None
    assert job.moved.tolist() == [False]
    assert host.contains(0, keys).all()


def test_the_kernel_sums_words_weighted_by_their_place_in_the_row():
    """An oracle of whole numbers: runs of two rows, in any order."""
    memory = torch.arange(4096, dtype=torch.int64).mul_(0x0123456789ABCDEF)
    runs = [(10, 0, 700, 1), (1500, 0, 1200, 0), (800, 700, 3, 1)]
    sums = torch.zeros(2, dtype=torch.int64)
    sum_rows(memory.view(torch.uint8), torch.tensor(runs).T.contiguous(), sums)
    expected = [0, 0]
    words = [int(word) % 2**64 for word in memory]
    for start, place, count, row in runs:
        for i in range(count):
            x = (place + i + 1) * 0x9E3779B97F4A7C15 % 2**64
            expected[row] += words[start + i] * ((x ^ (x >> 31)) | 1)
    assert [int(found) % 2**64 for found in sums] == [each % 2**64 for each in expected]
    row = memory[10:710].clone(), memory[800:803].clone()
    in_host_memory = torch.cat((*row, memory[:5])).view(torch.uint8).numpy()
    for runs in ([(0, 8 * 703)], [(0, 8 * 700), (8 * 700, 8 * 703)]):
        assert weighted_sum(in_host_memory, runs) == int(sums[1])
