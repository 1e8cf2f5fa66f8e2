# ruff: noqa: E402
"""Digest rates: on the device against read bandwidth, on the host against one core's.

PYTHONPATH=src python bench/digest.py --json bench/results/digest_gpu.json
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])

import time

import numpy as np
import torch
from bench.caches import CACHES, Cache
from bench.machine import arguments, interleaved, write

from kvstow.memory.arena import Arena
from kvstow.memory.digest import digest
from kvstow.route.blocks import Blocks


def measured(cache: Cache, order: str, total: int, repeats: int, device: str) -> dict[str, object]:
    """GB/s of a digest of scattered blocks, and of a sum over as many bytes."""
    count = total // cache.row_bytes
    layout = cache.layout(order, count + 2)
    arena = Arena(layout, device=device)
    if device == "cpu":
        arena.bytes.numpy().view(np.uint64)[:] = np.random.default_rng(0).integers(
            0, 1 << 63, layout.nbytes // 8, np.uint64)  # fmt: skip
    else:
        arena.bytes.random_(0, 256)
    nbytes = count * cache.row_bytes
    blocks = {0: Blocks.first(np.random.default_rng(1).permutation(count) + 1)}
    words = arena.bytes[:nbytes].view(torch.int64)
    other = torch.empty_like(words)

    def ended(act):
        def waited() -> None:
            act()
            if device != "cpu":
                torch.cuda.synchronize()

        return waited

    times = interleaved(
        {
            "digest": ended(lambda: digest(arena, blocks, count * cache.tokens)),
            "sum": ended(words.sum),
            "copy": ended(lambda: other.copy_(words)),
        },
        repeats,
        time.thread_time if device == "cpu" else time.perf_counter,
    )
    read = max(nbytes / times["sum"], 2 * nbytes / times["copy"] if device != "cpu" else 0)
    return {
        "nbytes": nbytes,
        "digest_GB/s": round(nbytes / times["digest"] / 1e9, 2),
        "sum_GB/s": round(nbytes / times["sum"] / 1e9, 2),
        "copy_GB/s_read_and_written": round(2 * nbytes / times["copy"] / 1e9, 2),
        "of_read_bandwidth": round(nbytes / times["digest"] / read, 3),
    }


def main() -> None:
    options = arguments(__doc__ or "")
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    results: dict[str, object] = {}
    for cache in CACHES:
        for order in ("BLHNC", "BLNHC", "BHLNC", "LBHNC"):
            for device in ("cpu", "cuda:0") if cuda else ("cpu",):
                on_host = device == "cpu"
                if on_host and cuda and order != "BLHNC":
                    continue
                total = min(options.bytes, 256 << 20) if on_host else 32 * options.bytes
                started = time.perf_counter()
                name = f"{device} {order} {cache.name}"
                results[name] = measured(cache, order, total, min(options.repeats, 7), device)
                took = time.perf_counter() - started
                print(f"{name}: {results[name]} ({took:.1f} s)", flush=True)
                write(options.json, results)
                if cuda:
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
