"""Byte chunks of other engines, kept by name under an identity."""

from pathlib import Path

import numpy as np
import pytest

from kvstow.adapters.chunks import MOST_SIZES, ChunkStore
from kvstow.errors import StoreError
from kvstow.plan.identity import Identity

MODEL = Identity(model="m", weights="ab" * 16)
OTHER = Identity(model="m", weights="cd" * 16)
CANARY = 0xA5


def opened(path: Path, identity: Identity = MODEL) -> ChunkStore:
    return ChunkStore(path, capacity=4 << 20, identity=identity)


def chunk(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng([size, seed]).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 4096, 100_001])
def test_chunks_of_any_size_come_back_byte_for_byte_in_another_process_time(
    tmp_path: Path, size: int
):
    names = [f"n{i}".encode() for i in range(3)]
    store = opened(tmp_path)
    assert store.store(names, [chunk(size, i) for i in range(3)]).all()
    store.close()
    store = opened(tmp_path)
    assert store.contains([*names, b"x"]).tolist() == [True, True, True, False]
    room = np.full(3 * (size + 2), CANARY, np.uint8).reshape(3, size + 2)
    assert store.load(names, [row[1:-1] for row in room]).all()
    for i, row in enumerate(room):
        assert (row[1:-1] == chunk(size, i)).all()
        assert row[0] == row[-1] == CANARY
    store.close()


def test_sizes_may_be_mixed_and_a_chunk_of_another_size_is_a_miss(tmp_path: Path):
    store = opened(tmp_path)
    sizes = (32, 48, 32)
    store.store([b"a", b"b", b"c"], [chunk(size, i) for i, size in enumerate(sizes)])
    room = [np.zeros(size, np.uint8) for size in (32, 32, 32)]
    assert store.load([b"a", b"b", b"c"], room).tolist() == [True, False, True]
    assert (room[2] == chunk(32, 2)).all()
    store.close()


def test_chunks_of_another_computation_are_refused_with_what_differs(tmp_path: Path):
    store = opened(tmp_path)
    store.store([b"a"], [chunk(32, 0)])
    store.close()
    with pytest.raises(StoreError, match="weights"):
        opened(tmp_path, OTHER)


def test_forgotten_chunks_are_gone(tmp_path: Path):
    store = opened(tmp_path)
    store.store([b"a", b"b"], [chunk(32, 0), chunk(64, 0)])
    assert store.evict([b"a", b"b", b"c"]) == 2
    assert not store.contains([b"a", b"b"]).any()
    store.close()


def test_nothing_and_too_many_sizes_are_refused(tmp_path: Path):
    store = opened(tmp_path)
    with pytest.raises(StoreError, match="0 bytes"):
        store.store([b"a"], [np.zeros(0, np.uint8)])
    for k in range(MOST_SIZES):
        store.store([b"a"], [chunk(16 + k, 0)])
    with pytest.raises(StoreError, match="hint: "):
        store.store([b"a"], [chunk(8, 0)])
    store.close()
