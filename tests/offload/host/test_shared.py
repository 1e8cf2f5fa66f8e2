"""Rows in shared memory: what the next process finds, and what its neighbours read."""

import os
import uuid
from dataclasses import replace

import numpy as np
import pytest

from kvstow.errors import StoreError
from kvstow.offload.disk.inspect import survey
from kvstow.offload.host.shared import (
    remove,
    shared_folder,
    shared_path,
    shared_tier,
    split_capacity,
)
from kvstow.offload.rows import pooled
from offloading import IDENTITY, hybrid, numbered_key, numbered_row

MIB = 1 << 20


@pytest.fixture
def name():
    name = f"kvstow-test-{uuid.uuid4().hex[:12]}"
    yield name
    remove(name)


def stored(tier, numbers, group=0):
    keys = [numbered_key(n) for n in numbers]
    return tier.store(group, keys, [numbered_row(tier, group, n) for n in numbers])


def served(tier, numbers, group=0):
    rows = [np.zeros(tier.layout.row_bytes(group), np.uint8) for _ in numbers]
    mask = tier.load(group, [numbered_key(n) for n in numbers], rows)
    for n, got, ok in zip(numbers, rows, mask, strict=True):
        assert not ok or (got == numbered_row(tier, group, n)).all()
    return mask


def test_rows_outlive_their_process_and_are_their_neighbours_too(name):
    one = shared_tier(name, hybrid(), capacity=MIB)
    assert one.name == "host_shared"
    assert stored(one, range(20)).all()
    other = shared_tier(name, pooled(hybrid(), MIB), capacity=MIB)
    assert served(other, range(20)).all()
    assert stored(other, range(20, 40)).all()
    assert served(one, range(40)).all()
    for tier in (one, other):
        tier.close()
    again = shared_tier(name, hybrid(), capacity=MIB)
    assert served(again, range(40)).all()
    assert again.prune(0) == 40  # the memory is given back
    again.close()
    assert survey(shared_folder(name, hybrid()))["data_bytes"] == 0


@pytest.mark.parametrize("seed", range(32))
def test_no_flipped_bit_of_any_file_exchanges_rows(name, seed):
    dice = np.random.default_rng(seed)
    tier = shared_tier(name, hybrid(), capacity=MIB)
    for n in range(0, 20, 4):
        stored(tier, range(n, n + 4))
    tier.close()
    for file in [file for file in shared_path(name).rglob("*") if file.is_file()]:
        data = bytearray(file.read_bytes())
        at = int(dice.integers(min(len(data), 512)))
        data[at] ^= 1 << int(dice.integers(8))
        file.write_bytes(data)
    try:
        tier = shared_tier(name, hybrid(), capacity=MIB)
    except StoreError:
        return  # refused, in words
    served(tier, range(20))
    tier.close()


def test_ranks_with_the_same_rows_share_them_and_others_do_not(name):
    layout = hybrid()
    ranks = [replace(layout, tp=(rank, 2)) for rank in (0, 1)]
    assert len({shared_folder(name, rank) for rank in (*ranks, layout)}) == 1
    others = [
        hybrid(order="BHLNC"),
        hybrid(content=16),
        hybrid(model="another"),
        layout.identified(replace(IDENTITY, weights="02" * 16)),
    ]
    assert len({shared_folder(name, other) for other in (layout, *others)}) == 5
    tiers = [shared_tier(name, rank, capacity=MIB) for rank in ranks]
    assert stored(tiers[0], range(4)).all()
    assert served(tiers[1], range(4)).all()
    for tier in tiers:
        tier.close()


def test_the_parts_of_host_memory_add_up():
    for nbytes in (64 << 10, MIB, 128 * MIB, 1 << 30, 100 << 30):
        window, shared = split_capacity(nbytes)
        assert window + shared == nbytes
        assert nbytes // 8 <= window <= nbytes // 2


def test_a_name_that_is_removed_costs_rows_only(name):
    tier = shared_tier(name, hybrid(), capacity=MIB)
    assert stored(tier, range(4)).all()
    remove(name)
    assert not shared_path(name).exists()
    assert not served(tier, range(4)).any()
    assert tier.counts.failures == 0
    tier.close()


@pytest.mark.parametrize("bad", ["", "a/b", "..", "x" * 300])
def test_a_name_that_is_none_is_refused(bad):
    with pytest.raises(StoreError, match="cannot be called"):
        shared_tier(bad, hybrid(), capacity=MIB)


def test_nothing_of_a_name_is_open_to_others(name):
    tier = shared_tier(name, hybrid(), capacity=MIB)
    stored(tier, range(4))
    tier.close()
    for path in (shared_path(name), *shared_path(name).rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
        assert path.stat().st_uid == os.geteuid()
