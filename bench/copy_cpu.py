# ruff: noqa: E402
"""Scattered rows in host memory against one big memcpy, and against per-layer segments.

PYTHONPATH=src python bench/copy_cpu.py --json bench/results/copy_cpu.json
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])

import ctypes

import numpy as np
import torch
from bench.caches import CACHES, Cache
from bench.machine import arguments, interleaved, write

from kvstow.memory.arena import Arena
from kvstow.memory.copy import block_copies, copy
from kvstow.route.copies import Copies


def each(source: Arena, destination: Arena, moves: Copies):
    """What the C library makes of the same rows."""
    addresses = ((moves.destination + destination.address).tolist(),
                 (moves.source + source.address).tolist(), moves.nbytes.tolist())  # fmt: skip

    def act() -> None:
        for place, start, nbytes in zip(*addresses, strict=True):
            ctypes.memmove(place, start, nbytes)

    return act


def measured(cache: Cache, total: int, repeats: int) -> dict[str, object]:
    count = total // cache.row_bytes
    nbytes = count * cache.row_bytes
    rng = np.random.default_rng(0)
    ids, others = (rng.permutation(2 * count)[:count] + 1 for _ in range(2))
    straight = np.arange(1, count + 1)
    actions = {}
    arenas = []
    for order, kind in (("BLHNC", "rows"), ("LBHNC", "segments")):
        layout = cache.layout(order, 2 * count + 1)
        source, destination = Arena(layout), Arena(layout)
        source.bytes.fill_(1)
        destination.bytes.fill_(2)
        arenas += [source, destination]
        moves = block_copies(layout, 0, ids, others)
        actions[f"{kind}, scattered"] = lambda s=source, d=destination, m=moves: copy(s, d, m)
        if kind == "rows":
            actions["rows, scattered, one memmove each"] = each(source, destination, moves)
            whole = block_copies(layout, 0, straight, straight)
            actions["rows, contiguous"] = lambda s=source, d=destination, m=whole: copy(s, d, m)
            actions["one big memcpy"] = lambda s=source, d=destination: ctypes.memmove(
                d.address, s.address, nbytes)  # fmt: skip
            actions["one big torch copy"] = lambda s=source, d=destination: d.bytes[:nbytes].copy_(
                s.bytes[:nbytes])  # fmt: skip
    times = interleaved(actions, repeats)
    best = times["one big memcpy"]
    found = {k: {"GB/s": round(nbytes / v / 1e9, 2), "of_big": round(best / v, 3)}
             for k, v in times.items()}  # fmt: skip
    return {"row_bytes": cache.row_bytes, "rows": count, **found}


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    results = {}
    for cache in CACHES:
        results[cache.name] = measured(cache, min(options.bytes, 512 << 20), options.repeats)
        print(cache.name, results[cache.name], flush=True)
    write(options.json, results)


if __name__ == "__main__":
    main()
