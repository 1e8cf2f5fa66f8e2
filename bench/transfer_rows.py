# ruff: noqa: E402
"""Many small reads against whole rows that the consumer cuts, over NIXL, in one run.

    PYTHONPATH=src python bench/transfer_rows.py --json bench/results/transfer_rows.json

The producer's ranks are agents of one process, the consumer is another. Each path runs in
processes of its own: what NIXL may use is fixed when it is loaded. A pull counts from the call to
acceptance, in turns; the best of each way counts, and the medians are there too. `chosen` is what
the agent takes by its own prices. Processor time is the consumer's: on a busy machine it says more
than a clock, and on one host it is all there is. The request's blocks are every second one on
average.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine

import json
import subprocess
import time
from contextlib import ExitStack
from hashlib import blake2b

import numpy as np
import torch
from bench.machine import arguments, write

import kvstow
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site
from kvstow.route.blocks import Blocks
from kvstow.route.price import LinkSpeed
from kvstow.route.sources import sources
from kvstow.transfer.generations import Generations
from kvstow.transfer.pull import Stats

IDENTITY = kvstow.Identity.unverified("bytes of a measurement")
TOKENS = 2048
CASES = {
    "llama-3.1-70b, tp 8 to 4": ("llama-3.1-70b", (8, 16), (4, 16)),
    "llama-3.1-8b, 16 to 64 tokens": ("llama-3.1-8b", (1, 16), (1, 64)),
    "llama-3.1-8b, tp 1 to 8": ("llama-3.1-8b", (1, 16), (8, 16)),
}
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}


def layout(model: str, tp: int, rank: int, block_tokens: int) -> kvstow.Layout:
    """One rank's packed rows, enough for two such requests."""
    layers = model_layers(model, tp=tp, tp_rank=rank, block_tokens=block_tokens)
    site = Site(tp=(rank, tp))
    groups = kvstow.grouped(layers.layers)
    return kvstow.packed(groups, num_slabs=2 * TOKENS // block_tokens, site=site)


def side(where: kvstow.Layout, name: str) -> tuple[kvstow.Arena, kvstow.Agent]:
    """An arena on huge pages, and an agent over NIXL."""
    arena = kvstow.Arena(where, huge_pages=True)
    owner = Generations(where)
    made = kvstow.Agent(
        arena, owner, transport=kvstow.NixlTransport(), identity=IDENTITY, name=name
    )
    made.start()
    return arena, made


def scattered(where: kvstow.Layout, block_tokens: int, seed: int) -> dict[int, Blocks]:
    """A request's blocks, in random order."""
    ids = np.random.default_rng(seed).permutation(np.arange(1, where.num_blocks(0)))
    return {0: Blocks.first(ids[: TOKENS // block_tokens])}


def ranks(case: str) -> list[kvstow.Layout]:
    """The layouts that the consumer's rank 0 reads from."""
    model, (tp, tokens), there = CASES[case]
    every = [layout(model, tp, rank, tokens) for rank in range(tp)]
    destination = layout(model, there[0], 0, there[1])
    return [every[source.index] for source in sources(every, destination)]


def produce(case: str) -> None:
    """Offer the request on all ranks, once per line on stdin."""
    tokens = CASES[case][1][1]
    with ExitStack() as stack:
        agents = []
        for i, where in enumerate(ranks(case)):
            arena, made = side(where, f"producer-{i}")
            stack.callback(made.close)
            arena.bytes.copy_(pattern(arena.nbytes, seed=i))
            agents.append((made, scattered(where, tokens, seed=i)))
        for _ in sys.stdin:
            tickets = [str(made.offer_blocks(blocks, TOKENS)) for made, blocks in agents]
            print(*tickets, flush=True)


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes that differ from place to place and from rank to rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def consume(case: str, repeats: int) -> dict[str, object]:
    """Pull it directly, by rows, and as the agent chooses, in turns."""
    model, _, (tp, tokens) = CASES[case]
    where = layout(model, tp, 0, tokens)
    into = scattered(where, tokens, seed=99)
    command = [sys.executable, sys.argv[0], "produce", case]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert child.stdin is not None
    assert child.stdout is not None
    arena, made = side(where, "consumer")
    stats: dict[str, Stats] = {}
    seen: dict[str, bytes] = {}

    def pull(way: str) -> float:
        print("offer", file=child.stdin, flush=True)
        tickets = [kvstow.Ticket.parse(text) for text in child.stdout.readline().split()]
        direction = None if way == "chosen" else way
        started, busy = time.perf_counter(), time.process_time()
        stats[way] = made.pull(tickets, into=into, direction=direction, digest="off").wait(120)
        took = time.perf_counter() - started
        processor[way].append(time.process_time() - busy)
        if way == "chosen":
            taken.append(sorted(set(stats[way].directions)))
        return took

    taken: list[list[str]] = []
    seconds: dict[str, list[float]] = {"read": [], "rows": [], "chosen": []}
    processor: dict[str, list[float]] = {"read": [], "rows": [], "chosen": []}
    try:
        for round_ in range(repeats + 1):
            for way, each in seconds.items():
                took = pull(way)
                if round_:
                    each.append(took)
                else:
                    seen[way] = digest(arena)
        peer = next(iter(made.peers.all.values()))
        link, here = peer.link, made.endpoint.copy_speed
    finally:
        made.close()
        child.stdin.close()
        child.wait(30)
    assert len(set(seen.values())) == 1, "the ways differ"
    best = {way: min(each) for way, each in seconds.items()}
    median = {way: float(np.median(each)) for way, each in seconds.items()}
    return {
        "read_over_rows": best["read"] / best["rows"],
        "read_over_rows_median": median["read"] / median["rows"],
        "read_over_rows_processor": min(processor["read"][1:]) / min(processor["rows"][1:]),
        "read_over_chosen": best["read"] / best["chosen"],
        "chosen": sorted(set(stats["chosen"].directions)),
        "chosen_by_pull": taken,
        "seconds": seconds,
        "processor_seconds": {way: each[1:] for way, each in processor.items()},
        "descriptors": {way: one.descriptors for way, one in stats.items()},
        "bytes": {way: one.nbytes for way, one in stats.items()},
        "link": speed(link),
        "copies_here": speed(here),
    }


def digest(arena: kvstow.Arena) -> bytes:
    return blake2b(arena.bytes.numpy().data).digest()


def speed(found: LinkSpeed | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {
        "gigabytes_per_second": found.bytes_per_second / 1e9,
        "us_per_copy": 1e6 * found.seconds_per_copy,
    }


def main() -> None:
    options = arguments(__doc__.partition("\n")[0])
    found: dict[str, object] = {"tokens": TOKENS}
    for path, env in (("one host", {}), ("tcp", TCP)):
        for case in CASES:
            command = [sys.executable, sys.argv[0], "consume", case, str(options.repeats)]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | env
            )
            one = json.loads(done.stdout.splitlines()[-1])
            found[f"{path}: {case}"] = one
            print(f"{path}: {case}: rows {one['read_over_rows']:.2f} times as fast as "
                  f"{one['descriptors']['read']} reads, chosen {one['chosen']}, link "
                  f"{one['link']}, copies here {one['copies_here']}", flush=True)  # fmt: skip
    write(options.json, found)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["produce", case]:
            produce(case)
        case ["consume", case, repeats]:
            print(json.dumps(consume(case, int(repeats))))
        case _:
            main()
