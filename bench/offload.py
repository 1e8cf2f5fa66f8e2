"""Disk tier against plain file I/O of the same bytes, and the index, on this machine.

    python bench/offload.py [--dir DIR] [--gib 1] [--rows 1000000] [--json FILE]

Every ratio compares two things done in the same run on the same file system: the tier (rows
with records, checksums, index) and a loop of large aligned direct reads or writes, which is
what `fio` with one job, 4 MiB blocks and the same queue depth does.
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvstow.offload.disk import DiskTier
from kvstow.offload.files import Files, aligned
from kvstow.offload.index import Entry, Index
from kvstow.plan.align import Site
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.spec import DType, Extent, Field, Full, LayerSpec

CHUNK = 4 << 20
THREADS = 4
REPEATS = 5


def llama(num_layers: int = 16) -> Layout:
    """Rows of half a MiB: Llama-3.2-1B, 16 tokens per block, bfloat16."""
    content = (Extent.whole("content", 64),)
    fields = (Field("k", DType.BFLOAT16, content), Field("v", DType.BFLOAT16, content))
    layers = [
        LayerSpec(name=f"layers.{i}", retention=Full(), block_tokens=16, states=16,
                  heads=Extent.whole("head", 8), fields=fields)
        for i in range(num_layers)
    ]  # fmt: skip
    return packed(grouped(layers), num_slabs=4, site=Site(model="llama-3.2-1b"))


def machine() -> dict[str, object]:
    with open("/proc/cpuinfo") as info:
        names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Plain:
    """Large aligned direct I/O on one preallocated file, with as many threads as the tier."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes, self.files = path, nbytes, Files()
        self.buffers = [aligned(CHUNK) for _ in range(THREADS)]
        for buffer in self.buffers:
            buffer[:] = np.random.default_rng(0).integers(0, 256, CHUNK, dtype=np.uint8)

    def _run(self, work: Callable[[int, int], object]) -> None:
        def lane(t: int) -> None:
            for offset in range(t * CHUNK, self.nbytes, THREADS * CHUNK):
                work(t, offset)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lane, range(THREADS)))

    def write(self) -> float:
        self.path.unlink(missing_ok=True)
        fd = self.files.open(self.path, create=True)

        def work() -> None:
            self.files.allocate(fd, self.nbytes)
            self._run(lambda t, offset: self.files.write(fd, [self.buffers[t]], offset))
            self.files.sync(fd)

        took = seconds(work)
        os.close(fd)
        return took

    def read(self) -> float:
        fd = self.files.open(self.path)
        took = seconds(
            lambda: self._run(lambda t, offset: self.files.read(fd, [self.buffers[t]], offset))
        )
        os.close(fd)
        return took


def disk(directory: Path, nbytes: int) -> dict[str, object]:
    """Store and load a long run of rows; plain I/O of the same bytes before and after each."""
    layout = llama()
    row = layout.row_bytes(0)
    count = nbytes // row
    memory, target = aligned(64 * row), aligned(256 * row)  # an arena's rows are aligned, too
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), dtype=np.uint8)
    target[:] = 1
    rows = [memory[i % 64 * row : (i % 64 + 1) * row] for i in range(count)]
    into = [target[i * row : (i + 1) * row] for i in range(256)]
    plain = Plain(directory / "plain", nbytes // CHUNK * CHUNK)
    took: dict[str, list[float]] = {"store": [], "load": [], "write": [], "read": []}
    for repeat in range(REPEATS):
        store = directory / f"store{repeat}"
        tier = DiskTier(store, layout, capacity=2 * nbytes + (1 << 30), threads=THREADS)
        keys = [f"{repeat}/{i}".encode() for i in range(count)]
        took["write"].append(plain.write())
        took["store"].append(seconds(lambda: tier.store(0, keys, rows)))
        took["write"].append(plain.write())
        took["read"].append(plain.read())

        def load() -> None:
            for lo in range(0, count, len(into)):
                part = keys[lo : lo + len(into)]
                assert tier.load(0, part, into[: len(part)]).all()

        took["load"].append(seconds(load))
        took["read"].append(plain.read())
        tier.close()
        shutil.rmtree(store)
    plain.path.unlink()
    gb = {name: count * row / 1e9 / min(times) for name, times in took.items()}
    return {
        "bytes": count * row,
        "row_bytes": row,
        "store_gb_per_s": gb["store"],
        "plain_write_gb_per_s": gb["write"],
        "load_gb_per_s": gb["load"],
        "plain_read_gb_per_s": gb["read"],
        "store_ratio": gb["store"] / gb["write"],
        "load_ratio": gb["load"] / gb["read"],
    }


def index(directory: Path, num_rows: int) -> dict[str, object]:
    """Look-ups, start-up and memory of a store with many rows.

    The rows are entered into the index directly: data files of a million real rows would
    only measure the disk again. Segment files are there and as long as they claim to be.
    """
    layout = llama(1)
    path = directory / "many"
    tier = DiskTier(path, layout, capacity=num_rows * 40_000)
    slots = tier.segments.slots[0]
    keys = [os.urandom(32) for _ in range(num_rows)]
    with tier.index.write() as write:
        for segment in range(-(-num_rows // slots)):
            with open(tier.segments.file(segment), "wb") as file:
                file.truncate(tier.segments.segment_bytes)
            write.add_segment(segment, 0, slots)
        places = write.free(0, num_rows)
        write.lease(0, places, 1)
        entries = [Entry(at, key, i + 1, 0, 0, b"")
                   for i, (at, key) in enumerate(zip(places, keys, strict=True))]  # fmt: skip
        write.enter(0, entries, 1)
    tier.close()
    del tier, entries, places
    tracemalloc.start()
    began = time.perf_counter()
    tier = DiskTier(path, layout)
    start_up = time.perf_counter() - began
    order = np.random.default_rng(0).permutation(num_rows)[:200_000]
    wanted = [keys[i] for i in order]
    begun = _resident()
    rates: list[float] = []
    tracemalloc.stop()
    for _ in range(REPEATS):
        rates.append(len(wanted) / seconds(lambda: tier.contains(0, wanted)))
    misses = [key[1:] + b"x" for key in wanted]
    miss_rate = len(misses) / min(seconds(lambda: tier.contains(0, misses)) for _ in range(3))
    begun = _resident()
    row = np.zeros(layout.row_bytes(0), np.uint8)
    evict = seconds(lambda: tier.evict(0, [keys[0]]))
    first_eviction = seconds(lambda: _first_eviction(tier))
    grown = _resident() - begun
    del row
    tier.close()
    size = sum(file.stat().st_size for file in path.glob("index.db*"))
    shutil.rmtree(path)
    return {
        "rows": num_rows,
        "start_up_s": start_up,
        "lookups_per_s": max(rates),
        "miss_lookups_per_s": miss_rate,
        "evict_one_s": evict,
        "first_eviction_s": first_eviction,
        "memory_bytes_per_row": grown / num_rows,
        "index_file_bytes_per_row": size / num_rows,
    }


def _first_eviction(tier: DiskTier) -> None:
    """What it takes a process to learn the ages of all rows."""
    tier._ages.victims(0, [1], [])  # type: ignore[reportPrivateUsage]


def _resident() -> int:
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="kvstow-bench-") as directory:
        result = {
            "machine": machine(),
            "disk": disk(Path(directory), int(options.gib * (1 << 30))),
            "index": index(Path(directory), options.rows),
        }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
