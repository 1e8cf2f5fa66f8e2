# ruff: noqa: E402
"""How long routes take: to compile, and to expand into moves.

    python bench/route.py [--json FILE]

Every figure is the best of several rounds in one process. Expansion is given for block ids
that are scattered and for ids in one run, where moves of neighbours are joined.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # bench/copy.py must not hide the standard `copy`

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstow.plan.blocklist import Blocks
from kvstow.plan.fleet import Fleet
from kvstow.plan.layout import ORDERS
from kvstow.plan.route import route

ROUNDS = 7
LARGEST = ("llama-3.1-405b", "deepseek-v4-pro", "kimi-k2", "qwen3-next-80b")

EXPANSIONS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "equal rows": ({}, {}, 32768),
    "BLHNC to BLNHC": ({}, {"order": "BLNHC"}, 512),
    "LBHNC to BLHNC": ({"order": "LBHNC"}, {}, 8192),
    "LBHNC to LBHNC": ({"order": "LBHNC"}, {"order": "LBHNC"}, 8192),
    "LHBNC to LHBNC": ({"order": "LHBNC"}, {"order": "LHBNC"}, 4096),
    "BLHNC, tp 2 to 1": ({"tp": 2}, {}, 8192),
    "BLHNC, 16 to 64 tokens": ({}, {"block_tokens": 64}, 4096),
    "BLHNC, 16 to 24 tokens": ({}, {"block_tokens": 24}, 2048),
    "LBNHC, 16 to 24 tokens": ({"order": "LBNHC"}, {"order": "LBNHC", "block_tokens": 24}, 2048),
}


def seconds(step: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)


def compile_times(model: str) -> dict[str, Any]:
    """The slowest of all pairs of orders, lanes of every kind of block pair included."""
    layouts = {order: Fleet(model=model, order=order).layout(0) for order in ORDERS}
    found: dict[str, float] = {}
    lanes: dict[str, int] = {}
    for one, here in layouts.items():
        for other, there in layouts.items():
            name = f"{one} to {other}"
            found[name] = seconds(lambda a=here, b=there: route(a, b).lanes)
            lanes[name] = sum(map(len, route(here, there).lanes))
    slowest = max(found, key=found.__getitem__)
    return {"milliseconds": found[slowest] * 1e3, "orders": slowest, "lanes": lanes[slowest]}


def expansion(here: dict[str, Any], there: dict[str, Any], num_blocks: int) -> dict[str, Any]:
    model = "llama-3.1-8b"
    slabs = num_blocks + 2
    a = Fleet(model=model, num_slabs=slabs, **here).layout(0)
    b = Fleet(model=model, num_slabs=slabs, **there).layout(0)
    spans = [layout.groups[0].group.block_tokens for layout in (a, b)]
    tokens = num_blocks * spans[0]
    counts = num_blocks, -(-tokens // spans[1])
    way = route(a, b)
    random = np.random.default_rng(0)
    report: dict[str, Any] = {}
    for kind in ("scattered", "one run"):
        ids = [random.permutation(count) + 1 if kind == "scattered" else np.arange(count) + 1
               for count in counts]  # fmt: skip
        lists = [{0: Blocks.first(numbers)} for numbers in ids]
        moves = len(way.moves(*lists, tokens))
        best = seconds(lambda lists=lists: way.moves(*lists, tokens))
        report[kind] = {
            "blocks": num_blocks,
            "moves": moves,
            "milliseconds": best * 1e3,
            "million_moves_per_second": moves / best / 1e6,
            "nanoseconds_per_block": best / num_blocks * 1e9,
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in facts if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    machine = f"{cpu}, Python {platform.python_version()}, numpy {np.__version__}"
    print(f"{machine}\n", file=sys.stderr)
    report: dict[str, Any] = {"machine": machine, "compile": {}, "expand": {}}
    for model in LARGEST:
        report["compile"][model] = figures = compile_times(model)
        print(f"{figures['milliseconds']:9.1f} ms  compile {model}, {figures['orders']}, "
              f"{figures['lanes']:,} lanes")  # fmt: skip
    for name, what in EXPANSIONS.items():
        report["expand"][name] = expansion(*what)
        for kind, figures in report["expand"][name].items():
            print(f"{figures['million_moves_per_second']:9.1f} M/s  {name}, {kind}: "
                  f"{figures['moves']:,} moves, {figures['milliseconds']:.2f} ms, "
                  f"{figures['nanoseconds_per_block']:.0f} ns per block")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
