# ruff: noqa: E402
"""Disk tier against plain file I/O of the same bytes, and the index, on this machine.

    PYTHONPATH=src python bench/offload.py [--dir DIR] [--bytes N] [--rows N] [--json FILE]

Every ratio compares two things done in the same run on the same file system: the tier (rows with
records, checksums and an index) and large aligned direct reads or writes by as many threads,
with as much set aside and synced, which is what `fio` does with 4 MiB blocks. Rows are loaded in
parts of 64 MiB, three at a time. Plain and tier take turns; `ratio` is the best
of all rounds against the best, so that other work on the machine counts least, and `ratio_median`
the median of ratios of neighbours. Processor time is given beside: it is what checksums and index
cost, and what a busy machine has none of.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from bench.machine import machine, write

from kvstow.offload.disk.files import Files, aligned
from kvstow.offload.disk.index import RowEntry
from kvstow.offload.disk.tier import DiskTier
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

CHUNK = 4 << 20
THREADS = 4
CALLERS = 3
PART = 64 << 20


def llama(num_layers: int = 16) -> Layout:
    """Rows of half a MiB: Llama-3.2-1B, 16 tokens per block, bfloat16."""
    content = (Extent.whole("content", 64),)
    fields = (Field("k", DType.BFLOAT16, content), Field("v", DType.BFLOAT16, content))
    layers = [
        LayerSpec(
            name=f"layers.{i}",
            retention=Full(),
            block_tokens=16,
            states=16,
            heads=Extent.whole("head", 8),
            fields=fields,
        )
        for i in range(num_layers)
    ]
    layout = packed(grouped(layers), num_slabs=4, site=Site(model="llama-3.2-1b"))
    return layout.identified(Identity.unverified("rows of random numbers"))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def busy(work: Callable[[], object]) -> float:
    """Seconds of processor time."""
    start = time.process_time()
    work()
    return time.process_time() - start


class Plain:
    """Large aligned direct I/O on one file, with as many threads as the tier."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes, self.files = path, nbytes // CHUNK * CHUNK, Files()
        self.buffers = [aligned(CHUNK) for _ in range(THREADS)]
        for buffer in self.buffers:
            buffer[:] = np.random.default_rng(0).integers(0, 256, CHUNK, dtype=np.uint8)

    def _run(self, work: Callable[[int, int], object]) -> None:
        def lane(t: int) -> None:
            for offset in range(t * CHUNK, self.nbytes, THREADS * CHUNK):
                work(t, offset)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lane, range(THREADS)))

    def write(self) -> None:
        self.path.unlink(missing_ok=True)
        fd = self.files.open(self.path, create=True)
        self.files.allocate(fd, 0, self.nbytes)
        self._run(lambda t, offset: self.files.write(fd, [self.buffers[t]], offset))
        self.files.sync(fd)
        os.close(fd)

    def read(self) -> None:
        fd = self.files.open(self.path)
        self._run(lambda t, offset: self.files.read(fd, [self.buffers[t]], offset))
        os.close(fd)


class Tiered:
    """The same bytes as rows of a store; rows lie aligned in memory, as in an arena."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.layout = llama()
        self.row = self.layout.row_bytes(0)
        self.count = nbytes // self.row
        self.part = PART // self.row
        memory, target = aligned(64 * self.row), aligned(CALLERS * self.part * self.row)
        memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), dtype=np.uint8)
        target[:] = 1
        self.rows = [memory[i % 64 * self.row :][: self.row] for i in range(self.count)]
        self.into = [target[i * self.row :][: self.row] for i in range(CALLERS * self.part)]
        self.directory = directory
        self.keys = [f"{i}".encode() for i in range(self.count)]
        self.round = 0

    def write(self) -> None:
        self.tier = DiskTier(
            self.directory / f"store{self.round}",
            self.layout,
            capacity=2 * self.count * self.row + (1 << 30),
            threads=THREADS,
        )
        assert self.tier.store(0, self.keys, self.rows).all()

    def read(self) -> None:
        def caller(c: int) -> None:
            for lo in range(c * self.part, self.count, CALLERS * self.part):
                keys = self.keys[lo : lo + self.part]
                rows = self.into[c * self.part :][: len(keys)]
                assert self.tier.load(0, keys, rows).all()

        with ThreadPoolExecutor(CALLERS) as pool:
            list(pool.map(caller, range(CALLERS)))

    def forget(self) -> None:
        self.tier.close()
        shutil.rmtree(self.tier.path)
        self.round += 1


def disk(directory: Path, nbytes: int, rounds: int) -> dict[str, object]:
    """Store and load a long run of rows, plain I/O of the same bytes before and after each."""
    plain, tiered = Plain(directory / "plain", nbytes), Tiered(directory, nbytes)
    stores, loads = Turns(plain.write, tiered.write), Turns(plain.read, tiered.read)
    for _ in range(rounds):
        stores.take()
        for _ in range(2):
            loads.take()
        tiered.forget()
    plain.path.unlink()
    total = tiered.count * tiered.row
    return {
        "bytes": total,
        "row_bytes": tiered.row,
        **stores.figures("write", "store", total),
        **loads.figures("read", "load", total),
    }


class Turns:
    """Plain and ours, one between two of the other."""

    def __init__(self, plain: Callable[[], object], ours: Callable[[], object]) -> None:
        self._plain, self._ours = plain, ours
        self._around: list[float] = []
        self._took: list[float] = []
        self._busy: dict[str, list[float]] = {"plain": [], "ours": []}

    def take(self) -> None:
        for work, name, times in (
            (self._plain, "plain", self._around),
            (self._ours, "ours", self._took),
            (self._plain, "plain", self._around),
        ):
            self._busy[name].append(busy(lambda: times.append(seconds(work))))  # noqa: B023

    def figures(self, plainly: str, ours: str, nbytes: int) -> dict[str, float]:
        beside = zip(self._around[::2], self._around[1::2], self._took, strict=True)
        return {
            f"{plainly}_gb_per_s": nbytes / 1e9 / min(self._around),
            f"{ours}_gb_per_s": nbytes / 1e9 / min(self._took),
            f"{ours}_ratio": min(self._around) / min(self._took),
            f"{ours}_ratio_median": statistics.median((a + b) / 2 / own for a, b, own in beside),
            f"{plainly}_cpu_s_per_gb": min(self._busy["plain"]) / nbytes * 1e9,
            f"{ours}_cpu_s_per_gb": min(self._busy["ours"]) / nbytes * 1e9,
        }


class Sparse(Files):
    """Data files as long as they claim, without space on the disk."""

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        os.ftruncate(fd, offset + nbytes)

    def free(self, path: Path) -> int:
        return 1 << 62


def index(directory: Path, num_rows: int) -> dict[str, object]:
    """Look-ups, start-up and memory of a store with many rows.

    The rows are entered into the index directly: data files of a million real rows would
    only measure the disk again. The data files are there, as long as they claim, and sparse.
    """
    layout = llama(1)
    path = directory / "many"
    tier = DiskTier(path, layout, capacity=num_rows * 40_000, files=Sparse())
    keys = [os.urandom(32) for _ in range(num_rows)]
    _enter(tier, keys)
    tier.close()
    began = time.perf_counter()
    tier = DiskTier(path, layout)
    start_up = time.perf_counter() - began
    order = np.random.default_rng(0).permutation(num_rows)[:200_000]
    wanted = [keys[i] for i in order]
    misses = [key[1:] + b"x" for key in wanted]
    resident = _resident()
    hit_s = min(seconds(lambda: tier.contains(0, wanted)) for _ in range(5))
    miss_s = min(seconds(lambda: tier.contains(0, misses)) for _ in range(3))
    busy_s = min(busy(lambda: tier.contains(0, wanted)) for _ in range(5))
    find_s = min(seconds(lambda: tier.index.find(0, wanted)) for _ in range(3))
    # The policy learns all rows' ages when somebody has to go for the first time.
    room = len(tier.index.segments()) * tier.segments.segment_bytes
    rows = [np.zeros(layout.row_bytes(0), np.uint8)] * 64
    free = tier.index.ask("SELECT COUNT(*) FROM slots")[0][0]
    with tier.index.write() as change:
        change.tell("UPDATE slots SET owner = -1")  # pretend that the store is full
        change.set_meta("capacity", room)
    tier.close()
    tier = DiskTier(path, layout)
    first_s = seconds(lambda: tier.store(0, [f"new{i}".encode() for i in range(64)], rows))
    grown = _resident() - resident
    tier.close()
    size = sum(file.stat().st_size for file in path.glob("index.db*"))
    shutil.rmtree(path)
    return {
        "rows": num_rows,
        "free_slots": free,
        "start_up_s": start_up,
        "lookups_per_s": len(wanted) / hit_s,
        "lookups_per_cpu_s": len(wanted) / busy_s,
        "lookups_of_missing_per_s": len(wanted) / miss_s,
        "found_with_place_per_s": len(wanted) / find_s,
        "first_eviction_s": first_s,
        "memory_bytes_per_row": grown / num_rows,
        "index_file_bytes_per_row": size / num_rows,
    }


def _enter(tier: DiskTier, keys: list[bytes]) -> None:
    slots = tier.segments.slots[0]
    with tier.index.write() as change:
        for segment in range(-(-len(keys) // slots)):
            tier.segments.create(segment, 0)
            change.add_segment(segment, 0, slots)
        places = change.free(0, len(keys))
        change.lease(0, places, 1)
        entries = [
            RowEntry(at, key, i + 1, 0, 0, b"")
            for i, (at, key) in enumerate(zip(places, keys, strict=True))
        ]
        change.enter(0, entries, 1)


def _resident() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("machine:", ", ".join(f"{k} {v}" for k, v in machine().items()), flush=True)
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="kvstow-bench-") as directory:
        results["disk"] = disk(Path(directory), options.bytes, options.repeats)
        print(results["disk"], flush=True)
        results["index"] = index(Path(directory), options.rows)
        print(results["index"], flush=True)
    write(options.json, results)


if __name__ == "__main__":
    main()
