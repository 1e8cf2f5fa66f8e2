"""Two processes, one run: pulls of scattered rows against raw NIXL and a plain copy.

    plain copy  as many bytes inside this process, in one piece: what memory can do
    raw         one contiguous buffer, posted to NIXL in one piece
    contiguous  the same bytes as packed rows in order, pulled by this library
    rows        … as scattered packed rows
    sampled     … with a sample of the digest compared
    by NIXL     … without a digest, by NIXL, where the agent copies mapped rows itself
    prepared    the same bytes as pieces of per-layer tensors, picked from prepared lists
    built       … from lists made for the request
    prepared by threads
                … by a NIXL agent that has threads of its own, as engines give it; on a host

Pulls go the way that the agent takes, unless one is forced. Each is repeated, in turns, and the
best of each counts; of what a sample costs, the ratio of the medians, which are less of a lottery
where it is a percent. A pull counts from the call to acceptance: routes, descriptors, messages,
fence. Our own time is that of a pull by NIXL, without the engine's share. `ratio_to_per_layer` is
against the prepared pieces; `baseline` says what each of them counts.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kvstow.testing.measure.baseline import Baseline
from kvstow.testing.measure.producer import Producer, producing
from kvstow.testing.measure.setting import IDENTITY, Setting
from kvstow.testing.measure.timed import TimedNixl
from kvstow.transfer.agent import Agent
from kvstow.transfer.loop import SOON
from kvstow.transfer.options import LONG_BYTES, DigestPolicy, Options, Way
from kvstow.transfer.tickets.owner import Generations
from kvstow.transfer.transport.base import Direction, Region

__all__ = ["Setting", "measured"]

ENGINE_THREADS = 4
"""What vLLM's connector gives its NIXL agent."""

BY_THREADS = "prepared by threads"
BY_NIXL = "by NIXL"


class TransferRun:
    """The consumer: an agent without a thread, so that every turn of it can be timed."""

    def __init__(self, setting: Setting, producer: Producer, direction: Way | None) -> None:
        self.setting = setting
        self.producer = producer
        self.transport = TimedNixl()
        self.arena = setting.arena()
        self.arena.bytes.fill_(1)
        self.agent = Agent(
            self.arena,
            Generations(self.arena.layout),
            transport=self.transport,
            identity=IDENTITY,
            name="consumer",
            options=Options(direction=direction),
        )
        self.peer = self.agent.peers.at(producer.address, "")
        seconds = self._met()
        producer.offer("one")  # says how long NIXL has taken there, after it has here
        self.connect_ms = 1e3 * (self.transport.connecting + producer.connecting)
        self.contact_ms = 1e3 * seconds - self.connect_ms
        assert self.peer.path is not None
        self.path = self.peer.path
        nixl_way = direction or self.path.way_of(LONG_BYTES)
        self.nixl_way: Way = nixl_way
        is_mapped = direction is None and self.peer.mapped is not None
        self.direction: Way = "mapped" if is_mapped else nixl_way
        self.descriptors: dict[str, int] = {}

    def _met(self) -> float:
        """Seconds from hello to a measured path."""
        started = time.perf_counter()
        self.peer.greet()
        self._turn(lambda: self.peer.state in ("ready", "broken"))
        if self.peer.error is not None:
            raise self.peer.error
        return time.perf_counter() - started

    def _turn(self, over: Callable[[], bool]) -> float:
        """Turn the agent until it is over, as its thread would; processor time of turns in
        which something happened, without the engine's share of it: in others it only looked
        again whether a post is over."""
        own = 0.0
        while not over():
            left_out, before = self.transport.seconds, self._signature()
            started = time.thread_time()
            wait = self.agent.loop.step()
            seconds = time.thread_time() - started
            if self._signature() != before:
                own += seconds - (self.transport.seconds - left_out)
            elif wait:
                time.sleep(min(wait, SOON))
        return own

    def _signature(self) -> tuple[object, ...]:
        pulls = len(self.agent.pulls.running)
        return self.peer.state, self.peer.heard_at, self.transport.starts, pulls

    def pull(
        self, order: str, digest: DigestPolicy, *, by_nixl: bool = False
    ) -> tuple[float, float]:
        """Seconds from pull to acceptance, and processor time of our own in them."""
        ticket = self.producer.offer(order)
        setting = self.setting
        into = {0: setting.in_order() if order == "in-order" else setting.scattered(seed=2)}
        way = self.nixl_way if by_nixl or self.direction != "mapped" else None
        started, busy = time.perf_counter(), time.thread_time()
        transfer = self.agent.pull(ticket, into=into, digest=digest, direction=way)
        own = time.thread_time() - busy
        own += self._turn(lambda: transfer.done)
        seconds = time.perf_counter() - started
        stats = transfer.wait(0)
        assert stats.nbytes == setting.nbytes
        self.descriptors[BY_NIXL if by_nixl else order] = stats.descriptors
        self._turn(lambda: transfer.quiet)
        self.agent.settle()
        return seconds, own

    def threaded(self) -> TimedNixl:
        """A NIXL agent with threads of its own, connected to the same producer."""
        card = self.peer.card
        assert card is not None
        made = TimedNixl(num_threads=ENGINE_THREADS)
        made.register(Region(self.arena.address, self.arena.nbytes))
        made.connect(card.engine, card.metadata)
        return made

    def plain_copy(self) -> float:
        """Seconds for as many bytes inside this process."""
        source = self.arena.bytes[: self.setting.nbytes]
        target = torch.empty_like(source)
        target.fill_(1)
        self._synchronize()
        started = time.perf_counter()
        target.copy_(source)
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.setting.device != "cpu":
            torch.cuda.synchronize()

    def baseline(self, transport: TimedNixl) -> Baseline:
        """NIXL alone between the same two processes, in the direction that pulls by it take."""
        direction: Direction = "write" if self.nixl_way == "write" else "read"
        card = self.peer.card
        assert card is not None
        return Baseline(
            transport.bare,
            card.engine,
            self.setting,
            (self.arena.address, card.base),
            self.agent.endpoint.kinds(card),
            direction,
        )

    def close(self) -> None:
        self.agent.close()


class Times:
    """Seconds of everything, repeat after repeat; the first one warms up."""

    def __init__(self, run: TransferRun) -> None:
        self._run = run
        alone = run.baseline(run.transport)
        self._alone = {
            "plain copy": run.plain_copy,
            "raw": alone.raw,
            "prepared": alone.prepared,
            "built": alone.built,
        }
        self._threaded: TimedNixl | None = None
        if run.setting.device == "cpu":
            self._threaded = run.threaded()
            self._alone[BY_THREADS] = run.baseline(self._threaded).prepared
        names = (*self._alone, "contiguous", "rows", "sampled", BY_NIXL)
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.own: list[float] = []
        self.producer_own: list[float] = []

    def repeat(self) -> None:
        """Everything once."""
        run = self._run
        self.seconds["contiguous"].append(run.pull("in-order", "off")[0])
        for name in ("rows", "sampled", "sampled", "rows"):
            digest = "off" if name == "rows" else "sample"
            self.seconds[name].append(run.pull("scattered", digest)[0])
        before = run.producer.busy_seconds
        seconds, own = run.pull("scattered", "off", by_nixl=True)
        self.seconds[BY_NIXL].append(seconds)
        self.own.append(own)
        run.producer.offer("one")  # says how long the producer was busy with it
        self.producer_own.append(run.producer.busy_seconds - before)
        for name, move in self._alone.items():
            run.producer.offer("in-order", awake_seconds=10.0)
            self.seconds[name].append(move())

    def close(self) -> None:
        if self._threaded is not None:
            self._threaded.close()


def measured(
    setting: Setting,
    direction: Way | None = None,
    progress: Callable[[int], None] = lambda round: None,
) -> dict[str, Any]:
    """The figures, as a document; `progress` hears of each round that begins, from 0."""
    with producing(setting) as producer:
        run = TransferRun(setting, producer, direction)
        times = Times(run)
        for i in range(1 + setting.repeats):
            progress(i)
            times.repeat()
        times.close()
        run.close()
    return _figures(run, times)


def _figures(run: TransferRun, times: Times) -> dict[str, Any]:
    """What was measured; the first round is left out."""
    setting = run.setting
    best, typical = (
        {name: of(each[1:]) for name, each in times.seconds.items()}
        for of in (min, statistics.median)
    )
    return {
        "ratio_to_raw": best["raw"] / best["rows"],
        "ratio_to_per_layer": best["prepared"] / best["rows"],
        "ratio_to_per_layer_built": best["built"] / best["rows"],
        "ratio_to_per_layer_by_threads": (
            best[BY_THREADS] / best["rows"] if BY_THREADS in best else None
        ),
        "engine_threads": ENGINE_THREADS,
        "overhead_us_per_pull": 1e6 * min(times.own[1:]),
        "producer_us_per_pull": 1e6 * min(times.producer_own[1:]),
        "machine": machine(setting.device),
        "digest_sample_cost": typical["sampled"] / typical["rows"] - 1,
        "contact_ms": run.contact_ms,
        "contact_nixl_ms": run.connect_ms,
        "gigabytes_per_second": {k: setting.nbytes / s / 1e9 for k, s in best.items()},
        "descriptors": {name: _descriptors(name, run) for name in best},
        "rows": setting.rows,
        "row_bytes": setting.row_bytes,
        "device": setting.device,
        "direction": run.direction,
        "probe": {
            "read_rate": run.path.read.long,
            "write_rate": run.path.write.long,
            "slots_rate": run.path.slots,
        },
        "ucx_tls": os.environ.get("UCX_TLS", ""),
        "seconds": {name: each[1:] for name, each in times.seconds.items()},
    }


def _descriptors(name: str, run: TransferRun) -> int:
    match name:
        case "raw" | "plain copy":
            return 1
        case "contiguous":
            return run.descriptors["in-order"]
        case "by NIXL":
            return run.descriptors[BY_NIXL]
        case "rows" | "sampled":
            return run.descriptors["scattered"]
        case _:
            return 2 * run.setting.layers * run.setting.rows


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
