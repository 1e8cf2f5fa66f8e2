# ruff: noqa: E402
"""Hit rates of LRU and S3-FIFO on traces of block keys, beside the best possible.

    PYTHONPATH=src python bench/policies.py [--requests 4000] [--seed 0] [--json FILE]

Traces are block keys as an offload tier sees them: a request asks for the blocks of its prompt
in order. `chat` continues conversations, `agents` share long prefixes of skewed popularity,
`scan` reads every document once among a few that return, `zipf` is single blocks. `belady`
evicts what is used farthest in the future: no policy can hit more.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine


import argparse
import heapq
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from bench.machine import write

from kvstow.offload.host.eviction import PolicyName, policy

SIZES = (0.02, 0.1, 0.3)
"""Slots, as parts of the number of different blocks in the trace."""


def chat(dice: np.random.Generator, requests: int) -> Iterator[int]:
    """Conversations that grow by a few blocks a turn; some are left, new ones begin."""
    open_: list[tuple[int, int]] = [(i << 20, 40) for i in range(60)]
    for number in range(requests):
        i = int(min(dice.geometric(0.05) - 1, len(open_) - 1))
        start, length = open_.pop(i)
        yield from range(start, start + length)
        open_.insert(0, (start, length + int(dice.integers(2, 20))))
        if dice.random() < 0.1:
            open_[-1] = (1000 + number) << 20, int(dice.integers(10, 80))


def agents(dice: np.random.Generator, requests: int) -> Iterator[int]:
    """Shared prefixes, skewed, with a tail of one's own that never returns."""
    for number in range(requests):
        prefix = int(dice.zipf(1.3)) % 400
        yield from range(prefix << 20, (prefix << 20) + 30 + prefix % 50)
        own = (10_000 + number) << 20
        yield from range(own, own + int(dice.integers(5, 40)))


def scan(dice: np.random.Generator, requests: int) -> Iterator[int]:
    """A few documents that return, between many that are read once."""
    for number in range(requests):
        document = int(dice.integers(0, 30)) if dice.random() < 0.4 else 100 + number
        yield from range(document << 20, (document << 20) + 50)


def zipf(dice: np.random.Generator, requests: int) -> Iterator[int]:
    yield from (dice.zipf(1.1, requests * 30) % (1 << 20)).tolist()


TRACES = {"chat": chat, "agents": agents, "scan": scan, "zipf": zipf}


def mixed(number: int) -> int:
    """A mark that looks like a hash."""
    number = (number ^ (number >> 31)) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    return number ^ (number >> 29)


def hit_rate(trace: list[int], name: PolicyName, size: int) -> float:
    """Hits of a tier of `size` slots that asks a policy whom to give up."""
    rows = policy(name, size)
    slot: dict[int, int] = {}
    holder = np.zeros(size, np.int64)
    free = list(range(size))
    pinned = np.zeros(size, bool)
    hits = 0
    for item in trace:
        if item in slot:
            hits += 1
            rows.touch(np.array([slot[item]]))
            continue
        if not free:
            for victim in rows.victims(1, pinned).tolist():
                del slot[int(holder[victim])]
                free.append(victim)
        at = free.pop()
        slot[item] = at
        holder[at] = item
        rows.insert(np.array([at]), [mixed(item)])
    return hits / len(trace)


def belady(trace: list[int], size: int) -> float:
    """Hits when the row that is used farthest in the future goes first."""
    later: dict[int, int] = {}
    following = [0] * len(trace)
    for i in range(len(trace) - 1, -1, -1):
        following[i] = later.get(trace[i], len(trace))
        later[trace[i]] = i
    kept: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = 0
    for i, item in enumerate(trace):
        hits += item in kept
        if item not in kept and len(kept) >= size:
            while True:
                when, victim = heapq.heappop(heap)
                if kept.get(victim) == -when:
                    del kept[victim]
                    break
        kept[item] = following[i]
        heapq.heappush(heap, (-following[i], item))
    return hits / len(trace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    traces: dict[str, object] = {}
    for name, make in TRACES.items():
        trace = list(make(np.random.default_rng(options.seed), options.requests))
        different = len(set(trace))
        lines = []
        for part in SIZES:
            size = max(1, int(part * different))
            rates = {p: hit_rate(trace, p, size) for p in ("lru", "s3fifo")}
            rates["belady"] = belady(trace, size)
            lines.append({"slots": size, **{k: round(v, 4) for k, v in rates.items()}})
            print(
                f"{name:7} {len(trace):8,} asks {different:8,} blocks {size:7,} slots  "
                + "  ".join(f"{k} {v:.3f}" for k, v in rates.items())
            )
        traces[name] = {"asks": len(trace), "blocks": different, "sizes": lines}
    write(options.json, {"requests": options.requests, "seed": options.seed, "traces": traces})


if __name__ == "__main__":
    main()
