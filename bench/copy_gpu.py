# ruff: noqa: E402
"""Rows between device and host, and inside the device, on one CUDA machine.

    PYTHONPATH=src python bench/copy_gpu.py --json bench/results/copy_gpu.json

Everything is a ratio within one run: to one big copy of as many bytes, and to per-layer segments
of the same bytes, K and V apart as engines have them. Between host and device, times are from the
call of `copy` to the return of `wait`, submission included; inside the device, they are the
device's own, with the host's part beside them.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine

import ctypes
import statistics
import traceback
from collections.abc import Callable

import numpy as np
import torch
from bench.caches import CACHES, Cache
from bench.machine import arguments, interleaved, write

from kvstow.memory import cuda
from kvstow.memory.arena import Arena
from kvstow.memory.copy import block_copies, copy
from kvstow.plan.layout import Layout
from kvstow.route.copies import Copies

DEVICE = torch.device("cuda:0")
METHODS = ("plain", "batch", "kernel")
LOOP_ROWS = 96
"""Rows of the per-segment loops, which are slow; rates come from their own bytes."""

Action = tuple[Callable[[], object], int]
"""What to do until it is over, and how many bytes that moves."""


def big(source: Arena, destination: Arena, nbytes: int) -> Action:
    """One asynchronous copy of as many bytes, from one end."""
    stream = torch.cuda.Stream(DEVICE)

    def act() -> None:
        status = cuda.runtime().cudaMemcpyAsync(
            ctypes.c_void_p(destination.address), ctypes.c_void_p(source.address),
            ctypes.c_size_t(nbytes), 4, ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        assert status == 0
        stream.synchronize()

    return act, nbytes


def moved(source: Arena, destination: Arena, moves: Copies, method: str) -> Action:
    def act() -> None:
        copy(source, destination, moves, method=method).wait()

    return act, moves.total


def looped(source: Arena, destination: Arena, moves: Copies) -> Action:
    """What engines do: one torch copy per piece."""
    stream = torch.cuda.Stream(DEVICE)
    columns = moves.source.tolist(), moves.destination.tolist(), moves.nbytes.tolist()
    pieces = list(zip(*columns, strict=True))

    def act() -> None:
        with torch.cuda.stream(stream):
            for start, place, n in pieces:
                destination.bytes[place : place + n].copy_(
                    source.bytes[start : start + n], non_blocking=True
                )
        stream.synchronize()

    return act, moves.total


def rates(actions: dict[str, Action], repeats: int) -> dict[str, float]:
    """Bytes per second of each, by the median of interleaved rounds."""
    times = interleaved({name: act for name, (act, _) in actions.items()}, repeats)
    return {name: nbytes / times[name] for name, (_, nbytes) in actions.items()}


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
    measured: dict[str, dict[str, float]] = {"d2h": {}, "h2d": {}}
    blocks = 2 * count + 1
    for layout in (cache.layout("BLHNC", blocks), cache.per_layer(blocks)):
        packed = layout.order == "BLHNC"
        device, host = filled(layout, on_device=True), filled(layout, on_device=False)
        moves = block_copies(layout, 0, ids, others)
        for name, a, b in (("d2h", device, host), ("h2d", host, device)):
            if packed:
                actions = {"big": big(a, b, count * cache.row_bytes)}
                actions |= {f"rows {m}": moved(a, b, moves, m) for m in (*METHODS, "auto")}
                together = block_copies(layout, 0, straight, straight)
                actions["contiguous auto"] = moved(a, b, together, "auto")
                measured[name] |= rates(actions, repeats)
            else:
                actions = {f"segments {m}": moved(a, b, moves, m)
                           for m in ("batch", "auto")}  # fmt: skip
                measured[name] |= rates(actions, min(repeats, 5))
                few = moves.part(0, LOOP_ROWS * cache.num_tensors)
                loops = {"segments plain": moved(a, b, few, "plain"),
                         "segments torch loop": looped(a, b, few)}  # fmt: skip
                measured[name] |= rates(loops, 3)
        if packed:
            found["both_ways"] = both_ways(layout, device, host, moves, repeats)
        host.close()
        device.close()
    for name, rate in measured.items():
        found[name] = {k: {"GB/s": round(v / 1e9, 2), "of_big": round(v / rate["big"], 3)}
                       for k, v in rate.items()}  # fmt: skip
        found[f"{name}_rows_over_segment_loop"] = round(
            rate["rows auto"] / rate["segments torch loop"], 1)  # fmt: skip
    return found


def many_rows(cache: Cache, total: int, repeats: int) -> dict[str, object]:
    """Several times as many scattered rows at once, where what a copy costs once weighs less."""
    count = 4 * total // cache.row_bytes
    rng = np.random.default_rng(2)
    layout = cache.layout("BLHNC", count + count // 8 + 1)
    device, host = filled(layout, on_device=True), filled(layout, on_device=False)
    ids, others = (rng.permutation(layout.num_blocks(0) - 1)[:count] + 1 for _ in range(2))
    moves = block_copies(layout, 0, ids, others)
    found: dict[str, object] = {"row_bytes": cache.row_bytes, "rows": count}
    for name, a, b in (("d2h", device, host), ("h2d", host, device)):
        actions = {"big": big(a, b, count * cache.row_bytes), "rows": moved(a, b, moves, "auto")}
        rate = rates(actions, repeats)
        found[name] = {"GB/s": round(rate["rows"] / 1e9, 2),
                       "of_big": round(rate["rows"] / rate["big"], 3)}  # fmt: skip
    host.close()
    device.close()
    return found


def both_ways(
    layout: Layout, device: Arena, host: Arena, moves: Copies, repeats: int
) -> dict[str, object]:
    """Device to host and host to device at once, against one after the other."""
    other_device, other_host = filled(layout, on_device=True), filled(layout, on_device=False)
    nbytes = moves.total

    def together() -> None:
        one, two = copy(device, other_host, moves), copy(host, other_device, moves)
        one.wait()
        two.wait()

    rate = rates(
        {
            "d2h": moved(device, other_host, moves, "auto"),
            "h2d": moved(host, other_device, moves, "auto"),
            "both": (together, 2 * nbytes),
        },
        repeats,
    )
    one_after_the_other = 2 / (1 / rate["d2h"] + 1 / rate["h2d"])
    return {
        "both_over_one": round(rate["both"] / one_after_the_other, 3),
        "GB/s": round(rate["both"] / 1e9, 1),
    }


def device_seconds(submit: Callable[[], object], repeats: int) -> float:
    """Median GPU time of what is submitted while the device is still busy with a pause, so that
    the host's part is over before the device's begins."""
    seconds: list[float] = []
    for round_ in range(repeats + 2):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(60_000_000)
        begin.record()
        submit()
        end.record()
        torch.cuda.synchronize()
        if round_ >= 2:
            seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def inside(cache: Cache, total: int, repeats: int) -> dict[str, object]:
    """Device to device: a row gather against one big copy; bytes are counted twice."""
    count = 8 * total // cache.row_bytes
    rng = np.random.default_rng(1)
    layout = cache.layout("BLHNC", 2 * count + 1)
    source, destination = filled(layout, on_device=True), filled(layout, on_device=True)
    ids, others = (rng.permutation(2 * count)[:count] + 1 for _ in range(2))
    moves = block_copies(layout, 0, ids, others)
    nbytes = count * cache.row_bytes
    big_one = lambda: destination.bytes[:nbytes].copy_(source.bytes[:nbytes])  # noqa: E731
    gpu = {"big": device_seconds(big_one, repeats)}
    for method in ("kernel", "batch"):
        gpu[method] = device_seconds(
            lambda m=method: copy(source, destination, moves, method=m).join(), repeats
        )
    wall = rates({"big": big(source, destination, nbytes),
                  "kernel": moved(source, destination, moves, "kernel")}, repeats)  # fmt: skip
    return {
        "row_bytes": cache.row_bytes,
        "rows": count,
        **{k: {"GB/s": round(2 * nbytes / v / 1e9), "of_big": round(gpu["big"] / v, 3)}
           for k, v in gpu.items()},
        "kernel, host's part included": round(wall["kernel"] / wall["big"], 3),
    }  # fmt: skip


def by_length(total: int, repeats: int) -> dict[str, object]:
    """Scattered pieces of one length: from where batched memcpy wins over the kernel."""
    layout = CACHES[2].layout("BLHNC", total // CACHES[2].row_bytes * 2)
    device, host = filled(layout, on_device=True), filled(layout, on_device=False)
    rng = np.random.default_rng(3)
    found: dict[str, object] = {}
    for length in (16 << 10, 128 << 10, 256 << 10, 1 << 20):
        slots = layout.nbytes // length
        count = min(slots // 2, 16384)
        places = [rng.permutation(slots)[:count].astype(np.int64) * length for _ in range(2)]
        moves = Copies(*places, np.full(count, length))
        for name, source, destination in (("d2h", device, host), ("h2d", host, device)):
            actions = {m: moved(source, destination, moves, m) for m in ("batch", "kernel")}
            found[f"{name} {length}"] = {
                k: round(v / 1e9, 1) for k, v in rates(actions, min(repeats, 5)).items()
            }
    return found


def main() -> None:
    options = arguments(__doc__ or "")
    if not torch.cuda.is_available():
        raise SystemExit("bench/copy_gpu.py needs a CUDA device")
    results: dict[str, object] = {}
    sections: dict[str, Callable[[], object]] = {
        **{f"inside {c.row_bytes}": lambda c=c: inside(c, options.bytes, options.repeats)
           for c in CACHES},
        **{f"rows {c.row_bytes}": lambda c=c: rows_and_segments(c, options.bytes, options.repeats)
           for c in CACHES},
        **{f"many {c.row_bytes}": lambda c=c: many_rows(c, options.bytes, options.repeats)
           for c in CACHES},
        "by_length": lambda: by_length(options.bytes, options.repeats),
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
