# ruff: noqa: E402
"""Device rows through the host tier against one big pinned copy, in one run, on one GPU.

    PYTHONPATH=src python bench/offload_gpu.py [--rows 512] [--json FILE]

Rows of 1.4 MiB (46 layers, K and V of 16 KiB each), scattered over the device arena. `store`
and `load` are whole jobs of a mover: reservation, batched copy, bookkeeping. Per-layer segments
copy the same bytes 16 KiB at a time, which is what an arena of one tensor per layer needs.
Needs numpy, torch and triton.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # bench/copy.py must not hide the standard `copy`


import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bench.machine import machine, write

from kvstow.memory.arena import Arena
from kvstow.offload.host import HostTier
from kvstow.offload.mover import Limits, Mover
from kvstow.plan.align import Site
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.spec import DType, Extent, Field, Full, LayerSpec

LAYERS = 46
REPEATS = 7


def rows_layout(num_rows: int) -> Layout:
    content = (Extent.whole("content", 64),)
    fields = (Field("k", DType.BFLOAT16, content), Field("v", DType.BFLOAT16, content))
    layers = [
        LayerSpec(name=f"layers.{i}", retention=Full(), block_tokens=16, states=16,
                  heads=Extent.whole("head", 8), fields=fields)
        for i in range(LAYERS)
    ]  # fmt: skip
    return packed(grouped(layers), num_slabs=4 * num_rows + 1, site=Site(model="bench"))


def best(work: Callable[[int], object]) -> float:
    """The shortest of several runs, in seconds."""
    times: list[float] = []
    for repeat in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work(repeat)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def keys_of(what: str, repeat: int, count: int) -> list[bytes]:
    return [f"{what}{repeat}/{i}".encode() for i in range(count)]


def measured(num_rows: int) -> dict[str, float]:
    layout = rows_layout(num_rows)
    row = layout.row_bytes(0)
    total = num_rows * row
    arena = Arena(layout, device="cuda")
    host = HostTier(layout, capacity=(2 * REPEATS + 4) * (total + row))
    mover = Mover(arena, host, limits=Limits(workers=4, part_bytes=96 << 20, max_bytes=1 << 40))
    dice = np.random.default_rng(0)
    ids = dice.permutation(np.arange(1, layout.num_blocks(0)))
    first, second = ids[:num_rows], ids[num_rows : 2 * num_rows]
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(total, dtype=torch.uint8, device="cuda")
    seconds = {
        "big_d2h": best(lambda _: pinned.copy_(device, non_blocking=True)),
        "big_h2d": best(lambda _: device.copy_(pinned, non_blocking=True)),
    }

    def store(repeat: int, what: str = "s") -> None:
        assert mover.store(0, first, keys_of(what, repeat, num_rows)).result(60).all()

    def load(repeat: int, what: str = "s") -> None:
        assert mover.load(0, keys_of(what, repeat, num_rows), second).result(60).all()

    def both(repeat: int) -> None:
        one = mover.store(0, first, keys_of("b", repeat, num_rows))
        other = mover.load(0, keys_of("s", repeat, num_rows), second)
        assert one.result(60).all()
        assert other.result(60).all()

    before = [arena.bytes[int(i) * row : int(i) * row + 64].cpu() for i in first[:4]]
    seconds["store"] = best(store)
    seconds["load"] = best(load)
    seconds["both"] = best(both)
    after = [arena.bytes[int(i) * row : int(i) * row + 64].cpu() for i in second[:4]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    few = max(1, num_rows // 16)
    seconds["segments_d2h"] = 16 * best(lambda _: _segments(arena, pinned, first[:few], row, True))
    seconds["segments_h2d"] = 16 * best(lambda _: _segments(arena, pinned, first[:few], row, False))
    mover.close()
    return _figures(seconds, total, row)


def _segments(arena: Arena, pinned: torch.Tensor, ids: np.ndarray, row: int, out: bool) -> None:
    """The same bytes, one asynchronous copy per layer and field."""
    step = row // (2 * LAYERS)
    for n, block in enumerate(ids.tolist()):
        for i in range(2 * LAYERS):
            here = arena.bytes[block * row + i * step : block * row + (i + 1) * step]
            there = pinned[n * row + i * step : n * row + (i + 1) * step]
            (there.copy_(here, non_blocking=True) if out else here.copy_(there, non_blocking=True))


def _figures(seconds: dict[str, float], total: int, row: int) -> dict[str, float]:
    gb = {name: total / 1e9 / took for name, took in seconds.items()}
    gb["both"] *= 2
    return {
        "row_bytes": row,
        "bytes": total,
        **{f"{name}_gb_per_s": value for name, value in gb.items()},
        "store_ratio": gb["store"] / gb["big_d2h"],
        "load_ratio": gb["load"] / gb["big_h2d"],
        "both_ratio": gb["both"] / max(gb["store"], gb["load"]),
        "store_to_segments": gb["store"] / gb["segments_d2h"],
        "load_to_segments": gb["load"] / gb["segments_h2d"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("machine:", ", ".join(f"{k} {v}" for k, v in machine().items()), flush=True)
    results = measured(options.rows)
    print("\n".join(f"{name} {value:.4g}" for name, value in results.items()))
    write(options.json, dict(results))


if __name__ == "__main__":
    main()
