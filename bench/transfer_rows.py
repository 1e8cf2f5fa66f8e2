# ruff: noqa: E402
"""Between unequal layouts, every way that bytes can take, over NIXL, in one run.

    PYTHONPATH=src python bench/transfer_rows.py --json bench/results/transfer_rows.json
    PYTHONPATH=src python bench/transfer_rows.py --device cuda --json …    arenas on one GPU

The producer's ranks are agents of one process, the consumer is another. Each case and each path
has processes of its own: what NIXL may use is fixed when it is loaded. The ways:

    chosen        what the agent takes by its own prices
    read, write   every piece on its own
    gathered      gathered by the producer and then written, whether that pays or not; likewise
    staged        gathered into slots in host memory, read, scattered; likewise
    rows          rows read whole into slots, cut there
    row writes    rows written whole into a second arena that has the producer's layout, then copied
                  to their places: no way of the agent's, but what one could reach; likewise

"Likewise": on a device, or with --all-ways.

Each way first brings a few tokens, and every byte of them is compared, and of the rows beside
them. Then all ways take turns. A way that is slow brings fewer tokens or runs less often: `tokens`
and the number of `seconds` say so. A pull counts from the call to acceptance; GB/s are wanted bytes
by the best time. Processor time is the consumer's: on a busy machine it says more than a clock. The
request's blocks are every second one on average, in random order.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.machine import machine, write

import kvstow
from kvstow.errors import KvstowError
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site
from kvstow.route.blocks import Blocks
from kvstow.route.price import LinkSpeed
from kvstow.route.sources import SourceRoute, sources
from kvstow.testing.patterns import CANARY, fill_canaries, fill_request, wrong_values
from kvstow.transfer.options import Options
from kvstow.transfer.tickets.generations import Generations

IDENTITY = kvstow.Identity.unverified("bytes of a measurement")
TOKENS = (2048, 1024, 512, 256, 128)
"""What a pull brings: the first of these that a way manages within a second, or the last."""
CASES = {
    "llama-3.1-70b, tp 8 to 4": ("llama-3.1-70b", (8, 16), (4, 16)),
    "llama-3.1-8b, 16 to 64 tokens": ("llama-3.1-8b", (1, 16), (1, 64)),
    "llama-3.1-8b, tp 1 to 8": ("llama-3.1-8b", (1, 16), (8, 16)),
}
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
PULL_SECONDS = 1.0
PATIENCE = 15.0
SLOT_BYTES = 32 << 20
GATHERS = {"gathered": True, "write": False}
"""Ways for which the producer does not choose by itself."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What both processes of a case know: passed as JSON."""

    case: str
    device: str
    all_ways: bool
    repeats: int
    seconds: float

    @property
    def options(self) -> Options:
        """On a host there are no staging slots unless they are wanted."""
        return Options(slot_bytes=SLOT_BYTES if self.all_ways and self.device == "cpu" else None)

    @property
    def ways(self) -> tuple[str, ...]:
        if self.device == "cpu" and not self.all_ways:
            return ("chosen", "write", "rows", "read")
        return ("chosen", "gathered", "write", "staged", "rows", "row writes", "read")

    @property
    def block_tokens(self) -> tuple[int, int]:
        """Tokens per block on either side."""
        return CASES[self.case][1][1], CASES[self.case][2][1]

    def destination(self) -> kvstow.Layout:
        model, _, (tp, tokens) = CASES[self.case]
        return layout(model, tp, 0, tokens)

    def brought(self) -> list[tuple[kvstow.Layout, SourceRoute]]:
        """The producer's ranks that the consumer's rank 0 needs, and what each brings."""
        model, (tp, tokens), _ = CASES[self.case]
        every = [layout(model, tp, rank, tokens) for rank in range(tp)]
        return [(every[one.index], one) for one in sources(every, self.destination())]

    def arena(self, where: kvstow.Layout) -> kvstow.Arena:
        return kvstow.Arena(where, device=self.device, huge_pages=self.device == "cpu")

    def agent(self, arena: kvstow.Arena, name: str) -> kvstow.Agent:
        made = kvstow.Agent(
            arena,
            Generations(arena.layout),
            transport=kvstow.NixlTransport(),
            identity=IDENTITY,
            name=name,
            options=self.options,
        )
        made.start()
        return made


def layout(model: str, tp: int, rank: int, block_tokens: int) -> kvstow.Layout:
    """One rank's packed rows, enough for two such requests."""
    layers = model_layers(model, tp=tp, tp_rank=rank, block_tokens=block_tokens)
    groups = kvstow.grouped(layers.layers)
    return kvstow.packed(groups, num_slabs=2 * TOKENS[0] // block_tokens, site=Site(tp=(rank, tp)))


def scattered(where: kvstow.Layout, num_blocks: int, seed: int) -> dict[int, Blocks]:
    """A request's blocks, in random order; fewer blocks are the first of more."""
    ids = np.random.default_rng(seed).permutation(np.arange(1, where.num_blocks(0)))
    return {0: Blocks.first(ids[:num_blocks])}


# ── the producer ──────────────────────────────────────────────────────────────────────────


def produce(setup: Setup) -> None:
    """Offer so many tokens as a line on stdin says, on all ranks; it also says whether they are
    gathered if they are written, or null."""
    size = setup.block_tokens[0]
    with ExitStack() as stack:
        agents: list[kvstow.Agent] = []
        for i, (where, _) in enumerate(setup.brought()):
            arena = setup.arena(where)
            fill_request(arena, scattered(where, TOKENS[0] // size, seed=i))
            agents.append(setup.agent(arena, f"producer-{i}"))
            stack.callback(agents[-1].close)
        for line in sys.stdin:
            tokens, gathers = json.loads(line)
            for made in agents:
                made.endpoint.gathers = gathers
            offered = [
                made.offer_blocks(scattered(made.endpoint.layout, tokens // size, seed=i), tokens)
                for i, made in enumerate(agents)
            ]
            print(*offered, flush=True)


# ── the consumer ──────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class WayTimes:
    """What one way took."""

    tokens: int = 0
    repeats: int = 0
    took: list[tuple[float, float]] = field(default_factory=list)
    descriptors: int = 0
    bytes: int = 0
    taken: list[list[str]] = field(default_factory=list)
    error: str = ""


@contextmanager
def noted(times: WayTimes) -> Generator[None]:
    """A way that fails is told, and the others go on."""
    try:
        yield
    except (AssertionError, KvstowError, TimeoutError) as error:
        times.error = f"{type(error).__name__}: {error}"[:300]


Offers = Callable[[int, bool | None], list[kvstow.Ticket]]


class Consumer:
    """One arena, its agent, and for row writes one more pair for each rank of the producer."""

    def __init__(self, setup: Setup, offers: Offers) -> None:
        self.setup = setup
        self.offers = offers
        self.arena = setup.arena(setup.destination())
        self.agent = setup.agent(self.arena, "consumer")
        self.brought = setup.brought()
        self.beside: list[tuple[kvstow.Arena, kvstow.Agent]] = []
        if "row writes" in setup.ways:
            arenas = [setup.arena(where) for where, _ in self.brought]
            self.beside = [(each, setup.agent(each, f"rows-{i}")) for i, each in enumerate(arenas)]

    def into(self, tokens: int) -> dict[int, Blocks]:
        return scattered(self.arena.layout, tokens // self.setup.block_tokens[1], seed=99)

    def wanted(self, tokens: int) -> tuple[int, int]:
        """Copies and bytes that all ranks bring."""
        found = [
            one.route.copies(
                scattered(where, tokens // self.setup.block_tokens[0], seed=i),
                self.into(tokens),
                tokens,
            )
            for i, (where, one) in enumerate(self.brought)
        ]
        return sum(map(len, found)), sum(each.total for each in found)

    def pull(self, way: str, tokens: int, times: WayTimes) -> tuple[float, float]:
        """Seconds from the call to acceptance, and processor seconds in them."""
        tickets = self.offers(tokens, GATHERS.get(way))
        started, busy = time.perf_counter(), time.process_time()
        if way == "row writes":
            found = self._row_writes(tickets, tokens)
        else:
            direction = {"chosen": None, "gathered": "write"}.get(way, way)
            found = [
                self.agent.pull(
                    tickets,
                    into=self.into(tokens),
                    direction=direction,
                    digest="off",
                    deadline=PATIENCE,
                ).wait(2 * PATIENCE)
            ]
        took = time.perf_counter() - started, time.process_time() - busy
        times.taken.append(sorted({each for one in found for each in one.directions}))
        times.descriptors = sum(one.descriptors for one in found)
        times.bytes = sum(one.nbytes for one in found)
        return took

    def _row_writes(self, tickets: list[kvstow.Ticket], tokens: int) -> list[Any]:
        """Have rows written whole, then copy what is wanted of them."""
        count = tokens // self.setup.block_tokens[0]
        rows = [scattered(arena.layout, count, seed=7) for arena, _ in self.beside]
        pulls = [
            agent.pull([ticket], into=each, direction="write", digest="off", deadline=PATIENCE)
            for (_, agent), ticket, each in zip(self.beside, tickets, rows, strict=True)
        ]
        found = [pull.wait(2 * PATIENCE) for pull in pulls]
        copying = [
            kvstow.copy(arena, self.arena, one.route.copies(each, self.into(tokens), tokens))
            for (arena, _), (_, one), each in zip(self.beside, self.brought, rows, strict=True)
        ]
        for each in copying:
            each.wait()
        return found

    def tried(self, way: str) -> WayTimes:
        """Bring a few tokens, compare them, and see how much this way can bring in a second."""
        times, few = WayTimes(), TOKENS[-1]
        fill_canaries(self.arena)
        with noted(times):
            self.pull(way, few, times)
            self._compare(way, few)
            again = min(self.pull(way, few, times)[0] for _ in range(2))
        if times.error:
            return times
        fits = [t for t in TOKENS if again * t / few <= PULL_SECONDS]
        times.tokens = fits[0] if fits else few
        each = again * times.tokens / few
        share = self.setup.seconds / len(self.setup.ways)
        times.repeats = max(2, min(self.setup.repeats, int(share / each)))
        return times

    def _compare(self, way: str, tokens: int) -> None:
        """AssertionError unless the request is as it was filled, and nothing else was written."""
        into = self.into(tokens)
        wrong = wrong_values(self.arena, into, tokens)
        assert wrong == 0, f"{way}: {wrong} values are wrong"
        self.arena.fill(0, into[0].ids, CANARY)
        others = int((self.arena.bytes != CANARY).sum())
        assert others == 0, f"{way}: {others} bytes of other rows were written"

    def close(self) -> None:
        for made in (self.agent, *(agent for _, agent in self.beside)):
            made.close()


def consume(setup: Setup) -> dict[str, Any]:
    """Every way, in turns."""
    command = [sys.executable, sys.argv[0], "produce", sys.argv[2]]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None

    def offers(tokens: int, gathers: bool | None) -> list[kvstow.Ticket]:
        print(json.dumps([tokens, gathers]), file=child.stdin, flush=True)
        return [kvstow.Ticket.parse(text) for text in child.stdout.readline().split()]

    consumer = Consumer(setup, offers)
    try:
        return measured(consumer)
    finally:
        consumer.close()
        child.stdin.close()
        child.wait(30)


def measured(consumer: Consumer) -> dict[str, Any]:
    setup = consumer.setup
    times = {way: consumer.tried(way) for way in setup.ways}
    for round_ in range(-1, setup.repeats):  # the first one warms up
        for way, each in times.items():
            if round_ < each.repeats and not each.error:
                with noted(each):
                    took = consumer.pull(way, each.tokens, each)
                    if round_ >= 0:
                        each.took.append(took)
    peer = next(iter(consumer.agent.peers.all.values()))
    path = peer.path
    assert path is not None
    copies, nbytes = consumer.wanted(TOKENS[0])
    return {
        "copies": copies,
        "wanted_bytes": nbytes,
        "chosen": times["chosen"].taken[-1] if times["chosen"].taken else None,
        "ways": {way: shown(consumer, each) for way, each in times.items()},
        "path": {
            "direction": path.direction,
            "read_rate": path.read_rate,
            "write_rate": path.write_rate,
            "staged_rate": path.staged_rate,
            "us_per_write": 1e6 * path.seconds_per_write,
        },
        "link": speed(peer.link),
        "copies_here": speed(consumer.agent.endpoint.copy_speed),
    }


def shown(consumer: Consumer, times: WayTimes) -> dict[str, Any]:
    if times.error:
        return {"error": times.error}
    copies, nbytes = consumer.wanted(times.tokens)
    seconds, processor_seconds = (list(each) for each in zip(*times.took, strict=True))
    return {
        "gigabytes_per_second": nbytes / min(seconds) / 1e9,
        "gigabytes_per_second_median": nbytes / float(np.median(seconds)) / 1e9,
        "tokens": times.tokens,
        "copies": copies,
        "wanted_bytes": nbytes,
        "descriptors": times.descriptors,
        "bytes": times.bytes,
        "taken": times.taken,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "compared_tokens": TOKENS[-1],
    }


def speed(found: LinkSpeed | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {
        "gigabytes_per_second": found.bytes_per_second / 1e9,
        "us_per_copy": 1e6 * found.seconds_per_copy,
    }


# ── all cases ─────────────────────────────────────────────────────────────────────────────


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:0")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--all-ways", action="store_true", help="as on a device, on a host too")
    parser.add_argument("--seconds", type=float, default=20.0, help="for the pulls of a case")
    return parser.parse_args()


def main() -> None:
    asked = options()
    device = "cuda:0" if asked.device == "cuda" else asked.device
    on_host = device == "cpu"
    found: dict[str, Any] = {"machine": machine(), "device": device, "tokens": TOKENS[0]}
    print("machine:", found["machine"], flush=True)
    for path, env in (("one host", {}), ("tcp", TCP)) if on_host else (("one GPU", {}),):
        for case in CASES:
            setup = json.dumps([case, device, asked.all_ways, asked.repeats, asked.seconds])
            one = found[f"{path}: {case}"] = in_process(setup, env, 45 + asked.seconds)
            print(f"{path}: {case}", *told(one), sep="\n  ", flush=True)
            write(asked.json, found)


def in_process(setup: str, env: dict[str, str], limit: float) -> dict[str, Any]:
    """What the consumer of a case says; or why it says nothing."""
    command = [sys.executable, sys.argv[0], "consume", setup]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=limit, env=os.environ | env
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not over within {limit} s"}
    if done.returncode:
        return {"error": f"ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def told(one: dict[str, Any]) -> list[str]:
    if "error" in one:
        return [one["error"]]
    lines = [
        f"{way:<11}{each['gigabytes_per_second']:8.2f} GB/s, {1e3 * min(each['seconds']):8.1f} ms "
        f"for {each['tokens']} tokens, {each['descriptors']} descriptors, took {each['taken'][-1]}"
        if "error" not in each
        else f"{way:<11}{each['error']}"
        for way, each in one["ways"].items()
    ]
    return [*lines, f"path {one['path']}, link {one['link']}, copies here {one['copies_here']}"]


if __name__ == "__main__":
    torch.set_num_threads(1)  # filling and comparing; on a busy machine more threads only wait
    match sys.argv[1:]:
        case ["produce", setup]:
            produce(Setup(*json.loads(setup)))
        case ["consume", setup]:
            print(json.dumps(consume(Setup(*json.loads(setup)))))
        case _:
            main()
