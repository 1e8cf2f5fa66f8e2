"""Two processes, one run: pulls of scattered rows against raw NIXL.

    raw         one contiguous buffer, posted to NIXL in one piece: the limit
    contiguous  the same bytes as packed rows in order, pulled by this library
    rows        … as scattered packed rows
    sampled     … with a sample of the digest compared
    per layer   the same bytes as 16 KiB pieces of per-layer tensors, posted to NIXL

Each is repeated, in turns, and the best of each counts. The child process only serves.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstow.errors import TransferError
from kvstow.memory.arena import Arena
from kvstow.plan.blocklist import Blocks
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.spec import DType, Extent, Field, Full, LayerSpec
from kvstow.transfer.agent import Agent
from kvstow.transfer.generations import Generations
from kvstow.transfer.nixl import NixlTransport
from kvstow.transfer.options import DigestPolicy, Options
from kvstow.transfer.path import Way
from kvstow.transfer.ticket import Ticket
from kvstow.transfer.timed import TimedTransport
from kvstow.transfer.transport import Spans

BLOCK_TOKENS = 16
PIECE = 16 << 10
SPARE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is moved: `rows` rows of `layers` layers, K and V of 16 KiB each."""

    rows: int = 512
    layers: int = 46
    repeats: int = 5
    device: str = "cpu"

    @property
    def row_bytes(self) -> int:
        return 2 * self.layers * PIECE

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def layout(self) -> Layout:
        """Packed rows: K and V of all layers side by side."""
        head = (Extent.whole("content", PIECE // BLOCK_TOKENS // 4 // 2),)
        layers = [
            LayerSpec(
                name=f"layers.{i}",
                retention=Full(),
                block_tokens=BLOCK_TOKENS,
                states=BLOCK_TOKENS,
                heads=Extent.whole("head", 4),
                fields=(Field("k", DType.BFLOAT16, head), Field("v", DType.BFLOAT16, head)),
            )
            for i in range(self.layers)
        ]
        return packed(grouped(layers), num_slabs=self.rows + SPARE)


def scattered(setting: Setting, seed: int) -> Blocks:
    """Rows in random order."""
    ids = np.random.default_rng(seed).permutation(np.arange(1, setting.rows + SPARE))
    return Blocks.first(ids[: setting.rows])


def in_order(setting: Setting) -> Blocks:
    return Blocks.first(np.arange(1, setting.rows + 1))


# ── the child ─────────────────────────────────────────────────────────────────────────


def serve(setting: Setting) -> None:
    """Offer rows once per line on stdin; answer with the ticket."""
    layout = setting.layout()
    arena = Arena(layout, device=setting.device)
    arena.bytes.fill_(7)
    with Agent(arena, Generations(layout), transport=NixlTransport(), name="producer") as agent:
        print(agent.address, flush=True)
        for line in sys.stdin:
            order, awake_seconds = line.split()
            agent.service.serving.stay_awake(float(awake_seconds))
            blocks = in_order(setting) if order == "in-order" else scattered(setting, seed=1)
            print(agent.offer_blocks({0: blocks}, setting.rows * BLOCK_TOKENS), flush=True)


class Producer:
    """The child, from here."""

    def __init__(self, setting: Setting) -> None:
        arguments = [str(setting.rows), str(setting.layers), setting.device]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvstow.transfer.bench", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._line()

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline().strip()
        if not line:
            raise TransferError(f"the producer ended with {self._child.wait()}", kind="peer")
        return line

    def offer(self, order: str, awake_seconds: float = 0.0) -> Ticket:
        assert self._child.stdin is not None
        print(order, awake_seconds, file=self._child.stdin, flush=True)
        return Ticket.parse(self._line())

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(30)
        if self._child.stdout is not None:
            self._child.stdout.close()


@contextmanager
def producing(setting: Setting) -> Generator[Producer]:
    producer = Producer(setting)
    try:
        yield producer
    finally:
        producer.close()


# ── the run ───────────────────────────────────────────────────────────────────────────


class Run:
    """The consumer: an agent without a thread, so that every turn of it can be timed."""

    def __init__(self, setting: Setting, producer: Producer, direction: Way | None) -> None:
        self.setting = setting
        self.producer = producer
        self.transport = TimedTransport(NixlTransport())
        layout = setting.layout()
        self.arena = Arena(layout, device=setting.device)
        self.arena.bytes.fill_(1)
        self.agent = Agent(self.arena, Generations(layout), transport=self.transport,
                           name="consumer", options=Options(direction=direction))  # fmt: skip
        self.contact = self.agent.service.contact(producer.address, "")
        self.contact.greet(time.monotonic())
        self.contact_ms = 1e3 * self._turn(lambda: self.contact.state in ("ready", "broken"))
        if self.contact.error is not None:
            raise self.contact.error
        assert self.contact.path is not None
        self.direction: Way = direction or self.contact.path.direction
        self.descriptors: dict[str, int] = {}

    def _turn(self, over: Callable[[], bool]) -> float:
        """Turn the agent until it is over; processor time of turns in which something
        happened, the engine's share of it left out."""
        own = 0.0
        while not over():
            inside, before = self.transport.seconds, self._signature()
            started = time.thread_time()
            self.agent.service.step(0)
            seconds = time.thread_time() - started
            if self._signature() != before:
                own += seconds - (self.transport.seconds - inside)
        return own

    def _signature(self) -> tuple[object, ...]:
        legs = [(leg.state, leg.told) for leg in self.contact.legs.values()]
        return (self.contact.state, self.contact.heard_at, self.transport.posts, tuple(legs),
                [transfer.done for transfer in self.agent.service.transfers])  # fmt: skip

    def pull(self, order: str, digest: DigestPolicy) -> tuple[float, float]:
        """Seconds from pull to acceptance, and processor time of our own in them."""
        ticket = self.producer.offer(order)
        rows = in_order(self.setting) if order == "in-order" else scattered(self.setting, seed=2)
        into = {0: rows}
        started, busy = time.perf_counter(), time.thread_time()
        transfer = self.agent.pull(ticket, into=into, digest=digest, direction=self.direction)
        own = time.thread_time() - busy
        own += self._turn(lambda: transfer.done)
        seconds = time.perf_counter() - started
        stats = transfer.wait(0)
        assert stats.nbytes == self.setting.nbytes
        self.descriptors[order] = stats.descriptors
        self._turn(lambda: transfer.quiet)
        self.agent.tend()
        return seconds, own

    def posted(self, local: Any, remote: Any, nbytes: int) -> float:
        """Seconds for copies posted straight to NIXL, in the direction that pulls take."""
        self.producer.offer("in-order", awake_seconds=10.0)
        card = self.contact.card
        assert card is not None
        kinds = self.agent.service.home.kinds(card)
        spans = Spans(self.arena.address + local, card.base + remote,
                      np.full(len(local), nbytes, np.int64))  # fmt: skip
        started = time.perf_counter()
        how = "write" if self.direction == "write" else "read"
        post = self.transport.inner.post(how, card.start, kinds, spans)
        while not post.poll():
            pass
        seconds = time.perf_counter() - started
        post.release()
        return seconds

    def raw(self) -> float:
        """One contiguous buffer."""
        none = np.zeros(1, np.int64)
        return self.posted(none, none, self.setting.nbytes)

    def per_layer(self) -> float:
        """Per-layer tensors, K and V apart: region after region, blocks scattered in each."""
        setting = self.setting
        regions = np.arange(2 * setting.layers) * (setting.rows + SPARE)

        def pieces(seed: int) -> Any:
            return (np.add.outer(regions, scattered(setting, seed).ids) * PIECE).ravel()

        return self.posted(pieces(2), pieces(1), PIECE)

    def close(self) -> None:
        self.agent.close()


def measured(setting: Setting, direction: Way | None = None) -> dict[str, Any]:
    """The figures, as a document."""
    with producing(setting) as producer:
        run = Run(setting, producer, direction)
        names = ("raw", "contiguous", "rows", "sampled", "per_layer")
        times: dict[str, list[float]] = {name: [] for name in names}
        own: list[float] = []
        for _ in range(1 + setting.repeats):
            times["raw"].append(run.raw())
            times["contiguous"].append(run.pull("in-order", "off")[0])
            seconds, ours = run.pull("scattered", "off")
            times["rows"].append(seconds)
            own.append(ours)
            times["sampled"].append(run.pull("scattered", "sample")[0])
            times["per_layer"].append(run.per_layer())
        best = {name: min(each[1:]) for name, each in times.items()}
        rates = {name: setting.nbytes / seconds / 1e9 for name, seconds in best.items()}
        path = run.contact.path
        assert path is not None
        document = {
            "ratio_to_raw": best["raw"] / best["rows"],
            "ratio_to_per_layer": best["per_layer"] / best["rows"],
            "overhead_us_per_pull": 1e6 * min(own[1:]),
            "machine": machine(setting.device),
            "digest_sample_cost": best["sampled"] / best["rows"] - 1,
            "contact_ms": run.contact_ms,
            "gigabytes_per_second": rates,
            "descriptors": {
                "raw": 1,
                "contiguous": run.descriptors["in-order"],
                "rows": run.descriptors["scattered"],
                "sampled": run.descriptors["scattered"],
                "per_layer": 2 * setting.layers * setting.rows,
            },
            "rows": setting.rows,
            "row_bytes": setting.row_bytes,
            "device": setting.device,
            "direction": run.direction,
            "probe": {"read_rate": path.read_rate, "write_rate": path.write_rate,
                      "staged_rate": path.staged_rate},
            "ucx_tls": os.environ.get("UCX_TLS", ""),
            "seconds": {name: each[1:] for name, each in times.items()},
        }  # fmt: skip
        run.close()
    return document


def machine(device: str) -> str:
    """The machine, in one line."""
    name = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    text = f"{names[0] if names else name}, {os.cpu_count()} cores"
    if device.startswith("cuda"):
        import torch

        text += f", {torch.cuda.get_device_name(device)}"
    return text


if __name__ == "__main__":
    serve(Setting(rows=int(sys.argv[1]), layers=int(sys.argv[2]), device=sys.argv[3]))
