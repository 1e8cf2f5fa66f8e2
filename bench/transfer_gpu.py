# ruff: noqa: E402
"""Rows in device memory between two processes on one GPU: mapped, by NIXL, and unequal layouts.

    PYTHONPATH=src python bench/transfer_gpu.py --json bench/results/transfer_gpu.json

Equal layouts: 512 rows of 1.5 MB the way that the agent takes, and forced to go by NIXL, beside
NIXL alone. Unequal ones: other tensor parallel sizes and tokens per block, with a sample of the
digest, the way that the agent takes. Needs a CUDA device, torch, nixl-cu13, msgspec, pyzmq,
prometheus-client. `--device cpu` tries the same in host memory.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine

import logging
import statistics
import subprocess
import time
from argparse import ArgumentParser
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TextIO

import numpy as np
from bench.machine import arguments, write

from kvstow import Agent, Arena, Blocks, Identity, NixlTransport, Ticket
from kvstow.plan.layout import Layout
from kvstow.plan.sizing.plan import Deployment
from kvstow.testing.bench_transfer import Setting, measure_transfer
from kvstow.transfer.tickets.owner import Generations

IDENTITY = Identity.unverified("bytes of a measurement")


@dataclass(frozen=True)
class Pair:
    """Two layouts of one model, and how many tokens go from the one to the other."""

    model: str
    tp: tuple[int, int]
    block_tokens: tuple[int, int]
    num_tokens: int

    def layout(self, side: int, rank: int) -> Layout:
        """Rank's layout, with twice the blocks that the request needs."""
        return Deployment(
            model=self.model,
            tp=self.tp[side],
            block_tokens=self.block_tokens[side],
            num_slabs=2 * self.num_tokens // self.block_tokens[side],
        ).layout(rank)

    def blocks(self, side: int) -> Blocks:
        """The request's, in random order."""
        count = self.num_tokens // self.block_tokens[side]
        ids = 1 + np.random.default_rng(side).permutation(2 * count - 1)  # 0 is nobody's
        return Blocks.first(ids[:count])

    @property
    def num_sources(self) -> int:
        """How many ranks bring what rank 0 of the consumer holds."""
        return max(1, self.tp[0] // self.tp[1])


PAIRS = {
    "Llama-70B, tp 8 to 4": Pair("llama-3.1-70b", (8, 4), (16, 16), 8192),
    "Llama-8B, tp 1 to 8": Pair("llama-3.1-8b", (1, 8), (16, 16), 32768),
    "Llama-8B, 16 to 64 tokens per block": Pair("llama-3.1-8b", (1, 1), (16, 64), 8192),
    "Llama-8B, 64 to 16 tokens per block": Pair("llama-3.1-8b", (1, 1), (64, 16), 8192),
}


def agent(layout: Layout, device: str, name: str) -> Agent:
    arena = Arena(layout, device=device)
    arena.bytes.fill_(7)
    owner = Generations(layout)
    return Agent(arena, owner, transport=NixlTransport(), identity=IDENTITY, name=name)


def produce(pair: Pair, device: str, out: TextIO) -> None:
    """Tickets of all ranks that are needed, for each line on stdin."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(agent(pair.layout(0, rank), device, f"producer-{rank}"))
            for rank in range(pair.num_sources)
        ]
        for _ in sys.stdin:
            made = (rank.offer_blocks({0: pair.blocks(0)}, pair.num_tokens) for rank in ranks)
            print(*made, file=out, flush=True)


def pull(name: str, device: str, repeats: int) -> dict[str, object]:
    """Seconds from the call to acceptance of each repeat, but for the first."""
    pair = PAIRS[name]
    child = subprocess.Popen(
        [sys.executable, __file__, "--produce", name, "--device", device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = []
    try:
        with agent(pair.layout(1, 0), device, "consumer") as consumer:
            for _ in range(1 + repeats):
                print(file=child.stdin, flush=True)
                tickets = [Ticket.parse(text) for text in child.stdout.readline().split()]
                started = time.perf_counter()
                transfer = consumer.pull(tickets, into={0: pair.blocks(1)}, digest="sample")
                stats = transfer.wait(60)
                seconds.append(time.perf_counter() - started)
                transfer.wait_quiet(60)
                consumer.settle()
    finally:
        child.stdin.close()
        child.wait(30)
    typical = statistics.median(seconds[1:])
    return {
        "gigabytes_per_second": stats.nbytes / typical / 1e9,
        "nbytes": stats.nbytes,
        "descriptors": stats.descriptors,
        "directions": stats.directions,
        "digest": stats.digest,
        "seconds": [round(each, 6) for each in seconds[1:]],
    }


def main() -> None:
    def more(parser: ArgumentParser) -> None:
        parser.add_argument("--device", default="cuda:0")
        parser.add_argument("--produce", choices=PAIRS, help="be the other process")

    if "--produce" in sys.argv:  # its output is tickets
        sys.stdout, tickets = sys.stderr, sys.stdout
    chosen = arguments(__doc__.partition("\n")[0], more)
    logging.getLogger("kvstow").setLevel(logging.ERROR)  # whose bytes these are does not matter
    if chosen.produce:
        produce(PAIRS[chosen.produce], chosen.device, tickets)
        return
    results: dict[str, object] = {}
    base = Setting(device=chosen.device, repeats=chosen.repeats)
    for name, setting, direction in (
        ("512 rows", base, None),
        ("512 rows, by NIXL", replace(base, repeats=2), "write"),
    ):
        results[name] = one = measure_transfer(setting, direction)
        rates = ", ".join(f"{k} {v:.2f}" for k, v in one["gigabytes_per_second"].items())
        print(f"{name}: {one['direction']}: GB/s {rates}", flush=True)
        write(chosen.json, results)
    for name in PAIRS:
        results[name] = one = pull(name, chosen.device, chosen.repeats)
        rate = one["gigabytes_per_second"]
        print(f"{name}: {one['directions']}: {rate:.1f} GB/s, {one['descriptors']} pieces")
        write(chosen.json, results)


if __name__ == "__main__":
    main()
