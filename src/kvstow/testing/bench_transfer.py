"""Two processes, one run: pulls of scattered rows against raw NIXL and a plain copy.

    plain copy  as many bytes inside this process, in one piece: what memory can do
    raw         one contiguous buffer, posted to NIXL in one piece
    contiguous  the same bytes as packed rows in order, pulled by this library
    rows        … as scattered packed rows
    sampled     … with a sample of the digest compared
    by NIXL     … without a digest, by NIXL, where the agent copies mapped rows itself
    prepared    the same bytes as pieces of per-layer tensors; a request picks them by index from
                lists of all pieces that were made when the engine started
    built       … from lists made for the request
    prepared by threads
                … by a NIXL agent that has threads of its own, as engines give it; on a host

Engines do one of the last three. What they do once counts nowhere; what they do per request
counts: indices or descriptors, the handle, the notification at the end. A pull counts from the
call to acceptance: routes, descriptors, messages, fence; it goes the way that the agent takes,
unless one is forced. Our own time is that of a pull by NIXL, without the engine's share. Everything
is repeated, in turns, and the best of each counts; of what a sample costs, the ratio of the
medians, which are less of a lottery where it is a percent.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import TransferError
from kvstow.route.ways import LONG_BYTES
from kvstow.testing.timed_agent import SPARE, Producer, Setting, TimedAgent, TimedNixl, producing
from kvstow.transfer.loop import SOON
from kvstow.transfer.options import DigestPolicy, Way
from kvstow.transfer.transport.base import Region
from kvstow.transfer.transport.nixl import OPERATIONS

__all__ = ["Setting", "measure_transfer"]

ENGINE_THREADS = 4
"""What vLLM's connector gives its NIXL agent."""

BY_THREADS = "prepared by threads"
BY_NIXL = "by NIXL"
DONE = b"done"


class Consumer(TimedAgent):
    """The agent that pulls, in contact with the producer."""

    def __init__(
        self, setting: Setting, producer: Producer, address: str, direction: Way | None
    ) -> None:
        super().__init__(setting, "consumer", direction)
        self.setting = setting
        self.producer = producer
        self.peer = self.peers.at(address, "")
        started = time.perf_counter()
        self.peer.greet()
        self._turn_until(lambda: self.peer.state in ("ready", "broken"))
        if self.peer.error is not None:
            raise self.peer.error
        self.contact_ms = 1e3 * (time.perf_counter() - started)
        assert self.peer.path is not None
        assert self.peer.card is not None
        self.path, self.card = self.peer.path, self.peer.card
        self.nixl_way: Way = direction or self.path.way_of(LONG_BYTES)
        is_mapped = direction is None and self.peer.mapped is not None
        self.way: Way = "mapped" if is_mapped else self.nixl_way
        self.descriptors = {"plain copy": 1, "raw": 1}

    def _turn_until(self, is_over: Callable[[], bool]) -> None:
        """Turn until it is over, as the agent's thread would."""
        while not is_over():
            own, wait = self.own, self.turn()
            if wait and self.own == own:
                time.sleep(min(wait, SOON))

    def timed_pull(
        self, name: str, order: str, digest: DigestPolicy = "off", *, by_nixl: bool = False
    ) -> float:
        """Seconds from the call to acceptance."""
        ticket, setting = self.producer.offer(order), self.setting
        into = {0: setting.in_order() if order == "in-order" else setting.scattered(seed=2)}
        way = self.nixl_way if by_nixl or self.way != "mapped" else None
        started = time.perf_counter()
        transfer = self.call(lambda: self.pull(ticket, into=into, digest=digest, direction=way))
        self._turn_until(lambda: transfer.done)
        seconds = time.perf_counter() - started
        stats = transfer.wait(0)
        assert stats.nbytes == setting.nbytes
        self.descriptors[name] = stats.descriptors
        self._turn_until(lambda: transfer.quiet)
        self.settle()
        return seconds

    def plain_copy(self) -> float:
        """Seconds for as many bytes inside this process."""
        source = self.endpoint.arena.bytes[: self.setting.nbytes]
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


class Baseline:
    """The same bytes through NIXL alone, between the same processes, in the direction that pulls by
    it take: posts straight to a connected NIXL agent, and watches without pause."""

    def __init__(self, consumer: Consumer, transport: TimedNixl) -> None:
        setting, card, arena = consumer.setting, consumer.card, consumer.endpoint.arena
        kinds = consumer.endpoint.kinds(card)
        self._nixl = transport.engine
        self._setting = setting
        self._peer = card.engine
        self._sides = (
            ("", arena.address, kinds.local, kinds.local_device),
            (card.engine, card.base, kinds.remote, kinds.remote_device),
        )
        self._operation = OPERATIONS["write" if consumer.nixl_way == "write" else "read"]
        self._regions = np.arange(2 * setting.layers) * (setting.rows + SPARE)

    def raw(self) -> float:
        """Seconds for one contiguous buffer."""
        started, start = time.perf_counter(), np.zeros(1, np.int64)
        return self._moved(self._described((start, start), self._setting.nbytes), started)

    def built(self) -> float:
        """Seconds for a request whose lists are made for it."""
        started, piece = time.perf_counter(), self._setting.piece
        offsets = self._pieces(2) * piece, self._pieces(1) * piece
        return self._moved(self._described(offsets, piece), started)

    def prepared(self) -> float:
        """Seconds for a request that picks from lists of all pieces."""
        lists = self._lists
        started = time.perf_counter()
        here, there = (self._pieces(seed).astype(np.int32) for seed in (2, 1))
        handle = self._nixl.make_prepped_xfer(
            self._operation, lists[0], here, lists[1], there, DONE
        )
        return self._moved(handle, started)

    def _pieces(self, seed: int) -> npt.NDArray[np.int64]:
        """Numbers of a request's pieces: region after region, its blocks in each."""
        return np.add.outer(self._regions, self._setting.scattered(seed).ids).ravel()

    @cached_property
    def _lists(self) -> list[Any]:
        """Every piece there is, on both sides."""
        count, piece = len(self._regions) * (self._setting.rows + SPARE), self._setting.piece
        return [
            self._nixl.prep_xfer_dlist(
                owner, _rows(base + np.arange(count) * piece, piece, device), kind
            )
            for owner, base, kind, device in self._sides
        ]

    def _described(
        self, offsets: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], nbytes: int
    ) -> Any:
        """A handle for copies of `nbytes` from and to these offsets."""
        here, there = (
            self._nixl.get_xfer_descs(_rows(base + at, nbytes, device), kind)
            for (_, base, kind, device), at in zip(self._sides, offsets, strict=True)
        )
        return self._nixl.initialize_xfer(self._operation, here, there, self._peer, DONE)

    def _moved(self, handle: Any, started: float) -> float:
        state = self._nixl.transfer(handle)
        while state == "PROC":
            state = self._nixl.check_xfer_state(handle)
        seconds = time.perf_counter() - started
        handle.release()
        if state != "DONE":
            raise TransferError(f"nixl: transfer state {state!r}", kind="transport")
        return seconds


def _rows(addresses: npt.NDArray[np.int64], nbytes: int, device: int) -> npt.NDArray[np.uint64]:
    rows: npt.NDArray[np.uint64] = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device
    return rows


# ── the measurement ───────────────────────────────────────────────────────────────────


def measure_transfer(
    setting: Setting,
    direction: Way | None = None,
    progress: Callable[[int], None] = lambda round: None,
) -> dict[str, Any]:
    """The figures, as a document; `progress` is called with each round that begins, from 0."""
    with producing(setting) as (producer, address):
        consumer = Consumer(setting, producer, address, direction)
        threaded = None
        if setting.device == "cpu":
            threaded = TimedNixl(num_threads=ENGINE_THREADS)
            threaded.register(Region(consumer.endpoint.arena.address, setting.layout().nbytes))
            threaded.connect(consumer.card.engine, consumer.card.metadata)
        times = Times(consumer, threaded)
        for i in range(1 + setting.repeats):
            progress(i)
            times.repeat()
        if threaded is not None:
            threaded.close()
        consumer.close()
    return _figures(consumer, times)


class Times:
    """Seconds of everything, repeat after repeat; the first one warms up."""

    def __init__(self, consumer: Consumer, threaded: TimedNixl | None) -> None:
        self._consumer = consumer
        alone = Baseline(consumer, consumer.transport)
        self._alone = {
            "plain copy": consumer.plain_copy,
            "raw": alone.raw,
            "prepared": alone.prepared,
            "built": alone.built,
        }
        if threaded is not None:
            self._alone[BY_THREADS] = Baseline(consumer, threaded).prepared
        names = (*self._alone, "contiguous", "rows", "sampled", BY_NIXL)
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.own: list[float] = []
        self.producer_own: list[float] = []

    def repeat(self) -> None:
        """Everything once."""
        consumer, producer = self._consumer, self._consumer.producer
        self.seconds["contiguous"].append(consumer.timed_pull("contiguous", "in-order"))
        for name in ("rows", "sampled", "sampled", "rows"):
            digest = "off" if name == "rows" else "sample"
            self.seconds[name].append(consumer.timed_pull(name, "scattered", digest))
        producer.offer("one")  # says how long the producer has been busy until now
        own, producer_own = consumer.own, producer.own
        self.seconds[BY_NIXL].append(consumer.timed_pull(BY_NIXL, "scattered", by_nixl=True))
        producer.offer("one")
        self.own.append(consumer.own - own)
        self.producer_own.append(producer.own - producer_own)
        for name, move in self._alone.items():
            producer.offer("in-order", awake_seconds=10.0)
            self.seconds[name].append(move())


def _figures(run: Consumer, times: Times) -> dict[str, Any]:
    """What was measured; the first round is left out."""
    setting = run.setting
    best, typical = (
        {name: of(each[1:]) for name, each in times.seconds.items()}
        for of in (min, statistics.median)
    )
    by_threads = best[BY_THREADS] / best["rows"] if BY_THREADS in best else None
    pieces = 2 * setting.layers * setting.rows
    return {
        "ratio_to_raw": best["raw"] / best["rows"],
        "ratio_to_per_layer": best["prepared"] / best["rows"],
        "ratio_to_per_layer_built": best["built"] / best["rows"],
        "ratio_to_per_layer_by_threads": by_threads,
        "engine_threads": ENGINE_THREADS,
        "overhead_us_per_pull": 1e6 * min(times.own[1:]),
        "producer_us_per_pull": 1e6 * min(times.producer_own[1:]),
        "machine": machine(setting.device),
        "digest_sample_cost": typical["sampled"] / typical["rows"] - 1,
        "contact_ms": run.contact_ms,
        "gigabytes_per_second": {k: setting.nbytes / s / 1e9 for k, s in best.items()},
        "descriptors": {name: run.descriptors.get(name, pieces) for name in best},
        "rows": setting.rows,
        "row_bytes": setting.row_bytes,
        "device": setting.device,
        "direction": run.way,
        "probe": {
            "read_rate": run.path.read.long,
            "write_rate": run.path.write.long,
            "slots_rate": run.path.slots,
        },
        "ucx_tls": os.environ.get("UCX_TLS", ""),
        "seconds": {name: each[1:] for name, each in times.seconds.items()},
    }


def machine(device: str) -> str:
    """The machine, in one line."""
    name = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    text = f"{names[0] if names else name}, {os.cpu_count()} cores"
    if device.startswith("cuda"):
        text += f", {torch.cuda.get_device_name(device)}"
    return text
