# ruff: noqa: E402
"""The disk tier on this machine: rows of several sizes, and stores of many rows.

    PYTHONPATH=src python bench/offload.py [--dir DIR] [--beside TREE] [--repeats N] [--json FILE]

With `--beside`, another version of the source is measured in the same run, in turns with this one,
so that other work on the machine meets both. Every measurement is a process of its own. A store is
written in calls of about 128 MB or 512 rows, read back in the same order, and then some of its rows
in an order drawn at random. Rates are those of the median call of the middle round, the first call,
which makes directories, left out. `--alone` stores the rows of the many one by one, so that each
has a file of its own.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from bench.machine import machine, write

from kvstow.offload.disk.files import Bytes, aligned
from kvstow.offload.disk.tier import DiskTier
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

ROWS = {4096: 10_240, 16_384: 10_240, 65_536: 5_120, 1_835_008: 639, 5_242_880: 225}
"""How many rows of each size are stored."""

MANY = (1, 1_000, 20_000, 500_000)
MANY_BYTES = 512
CALL_BYTES, CALL_ROWS = 128 << 20, 512


def layout_of(row_bytes: int) -> Layout:
    """One layer, 16 tokens per block."""
    content = (Extent.whole("content", row_bytes // 32),)
    layer = LayerSpec(
        name="layers.0",
        retention=Full(),
        block_tokens=16,
        states=16,
        heads=Extent.whole("head", 1),
        fields=(Field("k", DType.BFLOAT16, content),),
    )
    layout = packed(grouped([layer]), num_slabs=4, site=Site(model="rows"))
    return layout.identified(Identity.unverified("rows of random numbers"))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def opened(path: Path, row_bytes: int, count: int) -> DiskTier:
    capacity = 3 * count * (row_bytes + 8192) + (1 << 30)
    return DiskTier(path, layout_of(row_bytes), capacity=capacity)


def memory(row_bytes: int, count: int) -> list[Bytes]:
    """Rows that lie aligned in memory, as in an arena."""
    step = -(-row_bytes // 256) * 256
    block = aligned(step * count)
    block[:] = np.random.default_rng(0).integers(0, 256, len(block), dtype=np.uint8)
    return [block[i * step : i * step + row_bytes] for i in range(count)]


def rows(path: Path, row_bytes: int) -> dict[str, float]:
    """Megabytes a second, and microseconds for a look-up."""
    count = ROWS[row_bytes]
    tier = opened(path, row_bytes, count)
    step = min(CALL_ROWS, max(1, CALL_BYTES // row_bytes))
    source = memory(row_bytes, step)
    count = count // step * step
    keys = [os.urandom(16) for _ in range(count)]
    calls = [keys[lo : lo + step] for lo in range(0, count, step)]
    order = np.random.default_rng(1).permutation(count)[:step].tolist()

    def store(call: list[bytes]) -> None:
        assert tier.store(0, call, source[: len(call)]).all()

    def load(call: list[bytes]) -> None:
        assert tier.load(0, call, source[: len(call)]).all()

    def load_some() -> None:
        assert tier.load(0, [keys[i] for i in order], source[: len(order)]).all()

    def rate(work: Callable[[list[bytes]], None]) -> float:
        times = [seconds(lambda call=call: work(call)) for call in calls]
        return step * row_bytes / 1e6 / median(times[1:])

    figures = {
        "write_mb_per_s": rate(store),
        "read_mb_per_s": rate(load),
        "random_mb_per_s": len(order) * row_bytes / 1e6 / seconds(load_some),
        "lookup_us": seconds(lambda: tier.contains(0, keys)) / count * 1e6,
    }
    tier.close()
    return figures


def many(path: Path, count: int, *, alone: bool) -> dict[str, float]:
    """Milliseconds for what depends on how many rows there are."""
    tier = opened(path, MANY_BYTES, count)
    step = 1 if alone else CALL_ROWS
    source = memory(MANY_BYTES, step)
    keys = [os.urandom(16) for _ in range(count)]
    for lo in range(0, count, step):
        call = keys[lo : lo + step]
        assert tier.store(0, call, source[: len(call)]).all()
    tier.close()
    start = time.perf_counter()
    tier = opened(path, MANY_BYTES, count)
    start_up = time.perf_counter() - start
    some = [keys[i] for i in np.random.default_rng(1).integers(0, count, 20_000).tolist()]
    missing = [key[1:] + b"x" for key in some]
    figures = {
        "start_up_ms": start_up * 1e3,
        "usage_ms": seconds(lambda: tier.usage) * 1e3,
        "first_store_ms": seconds(lambda: tier.store(0, [b"new"], source[:1])) * 1e3,
        "lookup_us": seconds(lambda: tier.contains(0, some)) / len(some) * 1e6,
        "missing_us": seconds(lambda: tier.contains(0, missing)) / len(some) * 1e6,
    }
    tier.close()
    return figures


def measured(tree: Path, directory: Path, *what: str) -> dict[str, float]:
    """The figures of another process, which uses the source of that tree."""
    place = directory / "store"
    program = [sys.executable, __file__, "--dir", str(place), "--measure", *what]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(program, env=environment, stdout=subprocess.PIPE, check=True)
    shutil.rmtree(place)
    return json.loads(done.stdout)


def middle(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Of every figure the median."""
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def compared(
    trees: dict[str, Path], directory: Path, repeats: int, *what: str
) -> dict[str, object]:
    """Figures of every tree, taken in turns."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(repeats):
        for name, tree in trees.items():
            rounds[name].append(measured(tree, directory, *what))
    figures = {name: middle(taken) for name, taken in rounds.items()}
    for name, each in figures.items():
        shown = ", ".join(f"{what} {value:,.1f}" for what, value in each.items())
        print(f"{' '.join(what):<20} {name:<7} {shown}", flush=True)
    return dict(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--beside", type=Path, help="another source tree, measured in turns")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="a file for each of many rows")
    parser.add_argument("--most", type=int, default=MANY[-1], help="the most rows of a store")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, size = options.measure
        options.dir.parent.mkdir(parents=True, exist_ok=True)
        if what == "rows":
            print(json.dumps(rows(options.dir, int(size))))
        else:
            print(json.dumps(many(options.dir, int(size), alone=what == "alone")))
        return
    print("machine:", ", ".join(f"{k} {v}" for k, v in machine().items()), flush=True)
    trees = {"new": Path(__file__).parent.parent}
    if options.beside is not None:
        trees = {"old": options.beside, **trees}
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="kvstow-bench-") as directory:
        for size in ROWS:
            taken = compared(trees, Path(directory), options.repeats, "rows", str(size))
            results[f"rows of {size} bytes"] = taken
        what = "alone" if options.alone else "many"
        for count in MANY:
            if count <= options.most:
                taken = compared(trees, Path(directory), 1, what, str(count))
                results[f"{count} rows"] = taken
    write(options.json, results)


if __name__ == "__main__":
    main()
