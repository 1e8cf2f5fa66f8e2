# ruff: noqa: E402
"""Rows between device and host, and inside the device, on one CUDA machine.

    PYTHONPATH=src python bench/copy.py --json bench/results/copy_h200.json

Everything is a ratio within one run: to one big copy of as many bytes, and to per-layer segments
of the same bytes. Times are from the call of `copy` to the return of `wait`, submission included.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # this file's name must not hide the standard `copy`

import ctypes
import traceback

import numpy as np
import torch
from bench.caches import CACHES, Cache
from bench.machine import arguments, interleaved, write

from kvstow.memory import cuda
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.memory.moves import Spans, row_moves
from kvstow.plan.layout import Layout

DEVICE = torch.device("cuda:0")
METHODS = ("plain", "batch", "kernel", "staged")


def big(source: Arena, destination: Arena, nbytes: int):
    """One asynchronous copy of as many bytes, from one end."""
    stream = torch.cuda.Stream(DEVICE)

    def act() -> None:
        status = cuda.runtime().cudaMemcpyAsync(
            ctypes.c_void_p(destination.address), ctypes.c_void_p(source.address),
            ctypes.c_size_t(nbytes), 4, ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        assert status == 0
        stream.synchronize()

    return act


def moved(source: Arena, destination: Arena, moves: Spans, method: str):
    return lambda: copy(source, destination, moves, method=method).wait()


def filled(layout: Layout, *, on_device: bool) -> Arena:
    arena = Arena(layout, device=DEVICE) if on_device else Arena(layout, pinned=True)
    arena.bytes.random_(0, 256) if on_device else arena.bytes.fill_(1)
    return arena


def rows_and_segments(cache: Cache, total: int, repeats: int) -> dict[str, object]:
    """Both directions, scattered and contiguous, packed and per layer."""
    count = total // cache.row_bytes
    rng = np.random.default_rng(0)
    ids, others = (rng.permutation(2 * count)[:count] + 1 for _ in range(2))
    straight = np.arange(1, count + 1)
    found: dict[str, object] = {"row_bytes": cache.row_bytes, "rows": count}
    seconds: dict[str, dict[str, float]] = {}
    for order in ("BLHNC", "LBHNC"):
        layout = cache.layout(order, 2 * count + 1)
        device, host = filled(layout, on_device=True), filled(layout, on_device=False)
        scattered, contiguous = (row_moves(layout, 0, a, b) for a, b in
                                 ((ids, others), (straight, straight)))  # fmt: skip
        for name, source, destination in (("d2h", device, host), ("h2d", host, device)):
            actions = {"big": big(source, destination, count * cache.row_bytes)}
            for method in (*METHODS, "auto"):
                kind = "rows" if order == "BLHNC" else "segments"
                if not (kind == "segments" and method == "plain"):
                    actions[f"{kind} {method}"] = moved(source, destination, scattered, method)
                if kind == "rows":
                    actions[f"contiguous {method}"] = moved(source, destination, contiguous, method)
            times = interleaved(actions, repeats)
            if order == "LBHNC":  # slow: a few rounds say enough
                loop = {"segments plain": moved(source, destination, scattered, "plain")}
                times |= interleaved(loop, 3)
            seconds.setdefault(name, {}).update(
                {k if k != "big" else f"big {order}": v for k, v in times.items()}
            )
        if order == "BLHNC":
            found["both_ways"] = both_ways(layout, device, host, scattered, repeats)
        host.close()
        device.close()
    for name, times in seconds.items():
        nbytes = count * cache.row_bytes
        best = nbytes / times["big BLHNC"] / 1e9
        found[name] = {k: {"GB/s": round(nbytes / v / 1e9, 2),
                           "of_big": round(nbytes / v / 1e9 / best, 3)}
                       for k, v in times.items()}  # fmt: skip
        found[f"{name}_rows_over_segment_loop"] = round(
            times["segments plain"] / times["rows auto"], 1)  # fmt: skip
    return found


def both_ways(
    layout: Layout, device: Arena, host: Arena, moves: Spans, repeats: int
) -> dict[str, object]:
    """Device to host and host to device at once, against the slower of the two alone."""
    other_device, other_host = filled(layout, on_device=True), filled(layout, on_device=False)
    found: dict[str, object] = {}
    for method in ("batch", "kernel"):

        def together(method: str = method) -> None:
            one = copy(device, other_host, moves, method=method)
            two = copy(host, other_device, moves, method=method)
            one.wait()
            two.wait()

        times = interleaved(
            {
                "d2h": moved(device, other_host, moves, method),
                "h2d": moved(host, other_device, moves, method),
                "both": together,
            },
            repeats,
        )
        found[method] = {
            "both_over_one": round((times["d2h"] + times["h2d"]) / times["both"], 3),
            "GB/s": round(2 * int(moves.nbytes.sum()) / times["both"] / 1e9, 1),
        }
    return found


def inside(cache: Cache, total: int, repeats: int) -> dict[str, object]:
    """Device to device: a row gather against one big copy; bytes are counted twice."""
    count = 4 * total // cache.row_bytes
    rng = np.random.default_rng(1)
    layout = cache.layout("BLHNC", 2 * count + 1)
    source, destination = filled(layout, on_device=True), filled(layout, on_device=True)
    ids, others = (rng.permutation(2 * count)[:count] + 1 for _ in range(2))
    moves = row_moves(layout, 0, ids, others)
    nbytes = count * cache.row_bytes
    actions = {"big": big(source, destination, nbytes)}
    actions |= {m: moved(source, destination, moves, m) for m in ("kernel", "batch", "plain")}
    times = interleaved(actions, repeats)
    best = times["big"]
    found = {k: {"GB/s": round(2 * nbytes / v / 1e9), "of_big": round(best / v, 3)}
             for k, v in times.items()}  # fmt: skip
    return {"row_bytes": cache.row_bytes, "rows": count, **found}


def tuning(total: int, repeats: int) -> dict[str, object]:
    """The gather kernel's tile, step and warps, by GPU time alone."""
    from kvstow.memory.kernels import copy_tiles

    cache = CACHES[1]
    count = 2 * total // cache.row_bytes
    rng = np.random.default_rng(2)
    layout = cache.layout("BLHNC", 2 * count + 1)
    ids, others = (rng.permutation(2 * count)[:count] + 1 for _ in range(2))
    moves = row_moves(layout, 0, ids, others)
    device, other = filled(layout, on_device=True), filled(layout, on_device=True)
    host = filled(layout, on_device=False)
    found: dict[str, object] = {}
    for name, source, destination in (
        ("d2d", device, other), ("d2h", device, host), ("h2d", host, device)):  # fmt: skip
        for tile in (16 << 10, 64 << 10, 256 << 10):
            table = torch.as_tensor(cuda.tiles(moves, tile) // 16).to(DEVICE)
            for step in (4 << 10, 8 << 10, 16 << 10, 32 << 10):
                for warps in (4, 8, 16):
                    if not 512 <= step // warps <= 4096 or step > tile:
                        continue

                    def act(table=table, step=step, warps=warps) -> None:
                        copy_tiles(source.bytes, destination.bytes, table, 16,  # noqa: B023
                                   step_bytes=step, num_warps=warps)  # fmt: skip
                        torch.cuda.synchronize()

                    median = interleaved({"x": act}, min(repeats, 5))["x"]
                    factor = 2 if name == "d2d" else 1
                    rate = factor * count * cache.row_bytes / median / 1e9
                    found[f"{name} tile {tile} step {step} warps {warps}"] = round(rate, 1)
    return found


def by_length(total: int, repeats: int) -> dict[str, object]:
    """Scattered pieces of one length: from where batched memcpy wins over the kernel."""
    layout = CACHES[2].layout("BLHNC", total // CACHES[2].row_bytes * 2)
    device, host = filled(layout, on_device=True), filled(layout, on_device=False)
    rng = np.random.default_rng(3)
    found: dict[str, object] = {}
    for length in (4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20):
        slots = layout.nbytes // length
        count = min(slots // 2, 16384)
        places = [rng.permutation(slots)[:count].astype(np.int64) * length for _ in range(2)]
        moves = Spans(*places, np.full(count, length))
        for name, source, destination in (("d2h", device, host), ("h2d", host, device)):
            actions = {m: moved(source, destination, moves, m)
                       for m in ("batch", "kernel", "staged")}  # fmt: skip
            times = interleaved(actions, min(repeats, 7))
            found[f"{name} {length}"] = {
                k: round(count * length / v / 1e9, 1) for k, v in times.items()
            }
    return found


def main() -> None:
    options = arguments(__doc__ or "")
    if not torch.cuda.is_available():
        raise SystemExit("bench/copy.py needs a CUDA device")
    results: dict[str, object] = {}
    sections = {
        **{f"rows {c.row_bytes}": lambda c=c: rows_and_segments(c, options.bytes, options.repeats)
           for c in CACHES},
        **{f"inside {c.row_bytes}": lambda c=c: inside(c, options.bytes, options.repeats)
           for c in CACHES},
        "by_length": lambda: by_length(options.bytes, options.repeats),
        "tuning": lambda: tuning(options.bytes, options.repeats),
    }  # fmt: skip
    for name, section in sections.items():
        try:
            results[name] = section()
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        print(name, results[name], flush=True)
        write(options.json, results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
