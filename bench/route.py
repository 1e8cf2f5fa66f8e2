# ruff: noqa: E402
"""How long routes take: to compile, and to expand into copies.

    python bench/route.py [--json FILE]

Every figure is the best of many rounds in one process. Expansion is given for block ids that
are scattered and for ids in one run, where copies of neighbours are joined: there blocks per
second say more than copies per second. `partial` is a request whose last block is half full;
`latency` is one of 512 rows, scattered over a large pool.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench.machine import machine, write

from kvstow.plan.layout import ORDERS
from kvstow.plan.sizing.plan import Deployment
from kvstow.route.blocks import Blocks
from kvstow.route.route import Route, plan_route

ROUNDS = 7
SECONDS = 1.0
LARGEST = ("llama-3.1-405b", "deepseek-v4-pro", "kimi-k2", "qwen3-next-80b")

Options = dict[str, Any]
SMALL: Options = {"model": "llama-3.1-8b"}
LARGE: Options = {"model": "llama-3.1-70b", "tp": 4}
ONE_LAYER: Options = LARGE | {"pp": 80, "order": "LBNHC"}

EXPANSIONS: dict[str, tuple[Options, Options, int]] = {
    "equal rows": (SMALL, {}, 32768),
    "equal rows, llama-3.1-70b tp 4": (LARGE, {}, 100_000),
    "BHLNC, tp 4 to 8, one copy per block": (
        LARGE | {"order": "BHLNC"}, {"tp": 8}, 100_000
    ),
    "BHLNC, tp 8 to 4, one copy per block and peer": (
        LARGE | {"tp": 8, "order": "BHLNC"}, {"tp": 4}, 100_000
    ),
    "BLHNC to BLNHC": (SMALL, {"order": "BLNHC"}, 512),
    "LBHNC to BLHNC": (SMALL | {"order": "LBHNC"}, {"order": "BLHNC"}, 8192),
    "LBHNC to LBHNC": (SMALL | {"order": "LBHNC"}, {}, 8192),
    "LHBNC to LHBNC": (SMALL | {"order": "LHBNC"}, {}, 4096),
    "BLHNC, tp 2 to 1": (SMALL | {"tp": 2}, {"tp": 1}, 8192),
    "BLHNC, 16 to 64 tokens": (SMALL, {"block_tokens": 64}, 4096),
    "BLHNC, 16 to 24 tokens": (SMALL, {"block_tokens": 24}, 2048),
    "LBNHC, 16 to 64 tokens": (SMALL | {"order": "LBNHC"}, {"block_tokens": 64}, 8192),
    "LBNHC, 16 to 24 tokens": (SMALL | {"order": "LBNHC"}, {"block_tokens": 24}, 2048),
    "LBNHC, 16 to 64 tokens, one layer": (ONE_LAYER, {"block_tokens": 64}, 100_000),
    "LBNHC, 16 to 24 tokens, one layer": (ONE_LAYER, {"block_tokens": 24}, 100_000),
}  # fmt: skip
"""The source, in what the destination differs, and how many source blocks."""


def seconds(step: Callable[[], object], *, for_seconds: float = 0.0) -> float:
    """The fastest of many rounds: as many as fit, and not fewer than `ROUNDS`."""
    times: list[float] = []
    end = time.perf_counter() + for_seconds
    while len(times) < ROUNDS or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)


def compile_times(model: str) -> dict[str, Any]:
    """The slowest of all pairs of orders, lanes of every kind of block pair included."""
    layouts = {
        order: Deployment(model=model, order=order, num_slabs=16).layout(0) for order in ORDERS
    }
    found: dict[str, float] = {}
    lanes: dict[str, int] = {}
    for one, here in layouts.items():
        for other, there in layouts.items():
            name = f"{one} to {other}"
            found[name] = seconds(lambda a=here, b=there: plan_route(a, b).lanes)
            lanes[name] = sum(map(len, plan_route(here, there).lanes))
    slowest = max(found, key=found.__getitem__)
    return {"milliseconds": found[slowest] * 1e3, "orders": slowest, "lanes": lanes[slowest]}


def expansion(
    here: Options, change: Options, num_blocks: int, *, unfilled: int = 0
) -> dict[str, Any]:
    """Both kinds of ids, the whole pool in use; so many slots of the last block are not."""
    a = Deployment(num_slabs=num_blocks + 2, **here).layout(0)
    b = Deployment(num_slabs=num_blocks + 2, **here | change).layout(0)
    tokens = num_blocks * a.groups[0].group.block_tokens
    counts = num_blocks, -(-tokens // b.groups[0].group.block_tokens)
    way = plan_route(a, b)
    random = np.random.default_rng(0)
    report: dict[str, Any] = {}
    for kind in ("scattered", "one run"):
        ids = [random.permutation(count) + 1 if kind == "scattered" else np.arange(count) + 1
               for count in counts]  # fmt: skip
        report[kind] = measured(way, ids, tokens - unfilled)
    return report


def latency(num_rows: int = 512, pool: int = 100_000) -> dict[str, Any]:
    """A request of equal layouts, its last block full or not."""
    layout = Deployment(num_slabs=pool + 2, **LARGE).layout(0)
    random = np.random.default_rng(0)
    ids = [random.permutation(pool)[:num_rows] + 1 for _ in range(2)]
    way, tokens = plan_route(layout, layout), num_rows * layout.groups[0].group.block_tokens
    return {
        "full": measured(way, ids, tokens),
        "last block half full": measured(way, ids, tokens - 8),
    }


def measured(way: Route, ids: Sequence[npt.NDArray[np.int64]], tokens: int) -> dict[str, Any]:
    lists = [{0: Blocks.first(numbers)} for numbers in ids]
    count = len(way.copies(*lists, tokens))
    best = seconds(lambda: way.copies(*lists, tokens), for_seconds=SECONDS)
    return {
        "blocks": len(ids[0]),
        "copies": count,
        "milliseconds": best * 1e3,
        "million_copies_per_second": count / best / 1e6,
        "million_blocks_per_second": len(ids[0]) / best / 1e6,
    }


def show(name: str, report: dict[str, Any]) -> None:
    for kind, figures in report.items():
        print(f"{figures['million_copies_per_second']:9.1f} M copies/s "
              f"{figures['million_blocks_per_second']:7.2f} M blocks/s  {name}, {kind}: "
              f"{figures['blocks']:,} blocks, {figures['copies']:,} copies, "
              f"{figures['milliseconds']:.3f} ms")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    where = machine()
    print("machine:", ", ".join(f"{k} {v}" for k, v in where.items()), file=sys.stderr)
    report: dict[str, Any] = {"compile": {}, "expand": {}}
    for model in LARGEST:
        report["compile"][model] = figures = compile_times(model)
        print(f"{figures['milliseconds']:9.1f} ms  compile {model}, {figures['orders']}, "
              f"{figures['lanes']:,} lanes")  # fmt: skip
    for name, what in EXPANSIONS.items():
        report["expand"][name] = expansion(*what)
        show(name, report["expand"][name])
    report["partial"] = expansion(LARGE, {}, 100_000, unfilled=8)
    show("equal rows, llama-3.1-70b tp 4, last block half full", report["partial"])
    report["latency"] = latency()
    show("512 rows", report["latency"])
    write(options.json, report)


if __name__ == "__main__":
    main()
