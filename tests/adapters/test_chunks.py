"""Byte chunks of other engines, kept by name under an identity."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstow.adapters.chunks import MOST_SIZES, ChunkStore, chunk_name
from kvstow.errors import KvstowError, StoreError
from kvstow.offload.tier import load_from_first
from kvstow.plan.identity import Identity
from servers import Valkey

MODEL = Identity(model="m", weights="ab" * 16)
OTHER = Identity(model="m", weights="cd" * 16)
CANARY = 0xA5


def opened(path: Path, identity: Identity = MODEL) -> ChunkStore:
    return ChunkStore(disk=path, disk_bytes=4 << 20, identity=identity)


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


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.mark.parametrize("place", ["host", "remote"])
def test_chunks_of_two_sizes_come_back_from_host_memory_and_from_a_remote_store(place, valkey):
    places = {"host": "1MiB"} if place == "host" else {"remote": f"{valkey.url}?budget=10"}
    with closing(ChunkStore(identity=MODEL, **places)) as store:
        names = [b"a", b"b", b"c"]
        sizes = [32, 40, 32]
        store.store(names, [chunk(size, i) for i, size in enumerate(sizes)])
        assert store.flush(10)
        assert store.contains(names, sizes).all()
        assert store.contains(names, [40, 40, 40]).tolist() == [False, True, False]
        room = [np.zeros(size, np.uint8) for size in sizes]
        assert store.load(names, room).all()
        assert all((row == chunk(len(row), i)).all() for i, row in enumerate(room))
    with closing(ChunkStore(identity=OTHER, **places)) as other:
        assert not other.contains(names, sizes).any()
        assert not other.load(names, room).any()
        assert other.misses == {"absent": 3}


def test_a_chunk_of_another_size_is_a_miss_though_its_row_is_as_long(valkey):
    with closing(ChunkStore(identity=MODEL, remote=f"{valkey.url}?prefix=odd&budget=10")) as store:
        store.store([b"a"], [chunk(17, 0)])
        assert store.flush(10)
        assert not store.contains([b"a"], [20]).any()
        assert not store.load([b"a"], [np.zeros(20, np.uint8)]).any()
        assert store.load([b"a"], [np.zeros(17, np.uint8)]).all()


def damaged(path: Path) -> ChunkStore:
    """A store with chunks a and b, of which b was changed on disk."""
    with closing(opened(path)) as store:
        store.store([b"a", b"b"], [chunk(64, 0), chunk(64, 1)])
    file = next(  # rows that are stored together share a file, under a name each
        file
        for file in path.rglob("*")
        if file.is_file() and chunk(64, 1).tobytes() in file.read_bytes()
    )
    data = bytearray(file.read_bytes())
    data[data.index(chunk(64, 1).tobytes())] ^= 1
    file.write_bytes(data)
    return opened(path)


def test_a_chunk_that_was_changed_on_disk_is_a_miss_with_its_reason(tmp_path: Path):
    with closing(damaged(tmp_path)) as store:
        room = [np.zeros(64, np.uint8) for _ in range(3)]
        assert store.load([b"a", b"b", b"c"], room).tolist() == [True, False, False]
        assert store.misses == {"absent": 1, "damaged": 1}
        assert store.clear() == 1
        assert not store.contains([b"a", b"b"]).any()


def test_a_chunk_that_is_damaged_counts_once_however_many_loads_there_are_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The tiers count for all loads together."""
    place = "kvstow.adapters.chunks.load_from_first"
    with closing(damaged(tmp_path)) as store:

        def with_another(*arguments: Any) -> Any:
            monkeypatch.setattr(place, load_from_first)
            assert not store.load([b"b"], [np.zeros(64, np.uint8)]).any()
            return load_from_first(*arguments)

        monkeypatch.setattr(place, with_another)
        assert not store.load([b"c"], [np.zeros(64, np.uint8)]).any()
        assert store.misses == {"absent": 1, "damaged": 1}


def test_places_that_cannot_be_are_refused_before_anything_is_opened(tmp_path: Path):
    for places in (
        {},
        {"remote": "ftp://host/x"},
        {"disk": tmp_path / "new", "disk_bytes": "many"},
    ):
        with pytest.raises(KvstowError):
            ChunkStore(identity=MODEL, **places)
    assert not any(tmp_path.iterdir())


def test_parts_of_names_do_not_run_together():
    assert chunk_name("ab", "c") != chunk_name("a", "bc")
    assert chunk_name("a", b"b") == chunk_name(b"a", "b")
