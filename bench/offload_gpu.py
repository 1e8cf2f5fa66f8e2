# ruff: noqa: E402
"""Device rows through the host tier against one big pinned copy, in one run, on one GPU.

    PYTHONPATH=src python bench/offload_gpu.py [--rows 512 2048] [--json FILE]

Rows of 1.4 MiB (46 layers, K and V of 16 KiB each), scattered over the device arena. `store`
and `load` are whole jobs of a mover: reservation, batched copies, bookkeeping; `both` is one of
each at the same time, against the faster of the two alone. Ratios are best against best; `big_both`
is what two big copies reach together. Per-layer segments copy the same bytes 16 KiB at a time,
which is what an arena of one tensor per layer needs.

Needs numpy, torch and triton.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine


import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench.machine import machine, write

from kvstow.memory.arena import Arena
from kvstow.offload.copies.mover import USUAL, Mover
from kvstow.offload.host.tier import HostTier
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

LAYERS = 46
REPEATS = 5
WHOLE = 1 << 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows_layout(num_rows: int) -> Layout:
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
        for i in range(LAYERS)
    ]
    return packed(grouped(layers), num_slabs=2 * num_rows + 2, site=Site(model="bench"))


def settled() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def took(work: Callable[[], object]) -> float:
    settled()
    start = time.perf_counter()
    work()
    settled()
    return time.perf_counter() - start


def best(work: Callable[[], object]) -> float:
    """The shortest of several runs, in seconds."""
    return min(took(work) for _ in range(REPEATS))


class Rows:
    """An arena with so many rows to store and as many to load into, and plain memory."""

    def __init__(self, arena: Arena, host: HostTier, num_rows: int) -> None:
        self.arena, self.host, self.num_rows = arena, host, num_rows
        self.row = arena.layout.row_bytes(0)
        ids = np.random.default_rng(0).permutation(np.arange(1, arena.layout.num_blocks(0)))
        self.first, self.second = ids[:num_rows], ids[num_rows : 2 * num_rows]
        self.total = num_rows * self.row
        strip = arena.layout.footprints[0].strips[0]
        self._table = arena.bytes[strip.offset :].as_strided(
            (strip.count, self.row), (strip.stride, 1)
        )

    def big(self) -> dict[str, float]:
        """Seconds of one big copy each way, and of both together."""
        pinned, target = (
            torch.empty(self.total, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
            for _ in range(2)
        )
        ours, theirs = (torch.zeros(self.total, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        found = {
            "big_d2h": best(lambda: pinned.copy_(ours, non_blocking=True)),
            "big_h2d": best(lambda: ours.copy_(pinned, non_blocking=True)),
        }
        if DEVICE == "cuda":
            sides = torch.cuda.Stream(), torch.cuda.Stream()

            def both() -> None:
                with torch.cuda.stream(sides[0]):
                    target.copy_(theirs, non_blocking=True)
                with torch.cuda.stream(sides[1]):
                    ours.copy_(pinned, non_blocking=True)

            found["big_both"] = best(both)
        return found

    def segments(self) -> dict[str, float]:
        """Seconds of one asynchronous copy per row, layer and field, from a sixteenth."""
        step, few = self.row // (2 * LAYERS), self.first[: max(1, self.num_rows // 16)]
        pinned = torch.empty(len(few) * self.row, dtype=torch.uint8, pin_memory=DEVICE == "cuda")

        def run(out: bool) -> None:
            for n, block in enumerate(few.tolist()):
                here, there = self._table[block].split(step), pinned[n * self.row :].split(step)
                for a, b in zip(here, there, strict=False):
                    (b.copy_(a, non_blocking=True) if out else a.copy_(b, non_blocking=True))

        scale = self.num_rows / len(few)
        return {
            "segments_d2h": scale * best(partial(run, True)),
            "segments_h2d": scale * best(partial(run, False)),
        }

    def through(self) -> dict[str, float]:
        """Seconds of a store, of a load, and of both at once, by a mover of its own."""
        keys = [f"s{i}".encode() for i in range(self.num_rows)]
        more = [f"b{i}".encode() for i in range(self.num_rows)]
        times: dict[str, list[float]] = {"store": [], "load": [], "both": []}
        mover = Mover(self.arena, self.host, limits=replace(USUAL, max_bytes=WHOLE))

        def store() -> None:
            assert mover.store(0, self.first, keys).result(60).all()

        def load() -> None:
            assert mover.load(0, keys, self.second).result(60).all()

        def both() -> None:
            one, other = mover.store(0, self.first, more), mover.load(0, keys, self.second)
            assert one.result(60).all()
            assert other.result(60).all()

        for _ in range(REPEATS):
            self._table[torch.as_tensor(self.second, device=DEVICE)] = 0
            for name, work in (("store", store), ("load", load), ("both", both)):
                times[name].append(took(work))
            mover.reap()
            assert mover.drain(60)
            self.host.evict(0, keys)
            self.host.evict(0, more)
        mover.close()
        self._check()
        return {name: min(found) for name, found in times.items()}

    def _check(self) -> None:
        for one, other in zip(self.first.tolist(), self.second.tolist(), strict=True):
            assert torch.equal(self._table[one], self._table[other]), f"row {one} came as another"

    def figures(self, seconds: dict[str, float]) -> dict[str, float]:
        double = {"both", "big_both"}
        return {
            f"{name}_gb_per_s": self.total * (1 + (name in double)) / 1e9 / took
            for name, took in seconds.items()
        }


def ratios(gb: dict[str, float]) -> dict[str, float]:
    one_way = max(gb["store_gb_per_s"], gb["load_gb_per_s"])
    return {
        "store_ratio": gb["store_gb_per_s"] / gb["big_d2h_gb_per_s"],
        "load_ratio": gb["load_gb_per_s"] / gb["big_h2d_gb_per_s"],
        "both_ratio": gb["both_gb_per_s"] / one_way,
    }


def shown(name: str, found: dict[str, float]) -> None:
    print(f"{name:<28}" + "  ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)


def measured(counts: list[int]) -> dict[str, object]:
    layout = rows_layout(max(counts))
    arena = Arena(layout, device=DEVICE)
    arena.bytes.random_(0, 256)
    host = HostTier(layout, capacity=3 * max(counts) * layout.row_bytes(0) + (1 << 26))
    results: dict[str, object] = {}
    for count in counts:
        rows = Rows(arena, host, count)
        gb = rows.figures(rows.big())
        if count == min(counts):
            gb |= rows.figures(rows.segments())
        gb |= rows.figures(rows.through())
        results[str(count)] = gb | ratios(gb)
        print(f"{count} rows: " + ", ".join(f"{k} {v:.4g}" for k, v in gb.items()), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("machine:", ", ".join(f"{k} {v}" for k, v in machine().items()), flush=True)
    write(options.json, measured(options.rows))


if __name__ == "__main__":
    main()
