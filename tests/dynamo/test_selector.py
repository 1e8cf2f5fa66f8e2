"""Dynamo's indexer and selector, fed by the events of two engines with host and disk tiers.

Run by scripts/test-dynamo.
"""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.events.publisher import EventPublisher
from kvstow.memory.arena import Arena
from kvstow.offload.events import EngineEvents
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full, Window
from offloading import IDENTITY, layer

pytestmark = [pytest.mark.dynamo, pytest.mark.timeout(120)]

SIZE = 16
LAYERS = [layer("l.0", Full(), block_tokens=SIZE), layer("l.1", Window(32), block_tokens=SIZE)]
LAYOUT = packed(grouped(LAYERS), num_slabs=64).identified(IDENTITY)
LOOPBACK = "tcp://127.0.0.1:*"


class Engine:
    """A ledger, a host tier, a disk, and events of all three."""

    def __init__(self, worker: int, directory: Path) -> None:
        self.worker = worker
        self.arena = Arena(LAYOUT)
        self.ledger = Ledger(Pool(LAYOUT))
        self.store = Store(host="1MiB", disk=directory, disk_bytes="2MiB").bind(LAYOUT)
        self.publisher = EventPublisher(LOOPBACK, replay=LOOPBACK)
        self.events = EngineEvents(self.publisher, ledger=self.ledger, store=self.store)

    def compute(self, tokens: list[int], *, save: bool = False) -> None:
        prompt = Prompt.of(tokens)
        self.events.know(prompt)
        request = self.ledger.admit(prompt).request
        if save:
            self.store.save(self.arena, self.ledger.blocks(request), prompt)
            self.store.flush()
        self.ledger.release(request)
        self.events.turn()

    def push_off_device(self) -> None:
        """Compute other prompts, until the device has room for nothing else."""
        for seed in range(10, 30):
            self.compute(tokens_of(seed, 6))

    def push_out_of_host(self) -> None:
        assert self.store.host is not None
        assert self.store.disk is not None
        self.store.host.evict(0, self.store.disk.keys(0))
        self.events.turn()

    def push_off_disk(self) -> None:
        assert self.store.disk is not None
        self.store.disk.prune(0)
        self.events.turn()

    def close(self) -> None:
        self.publisher.close()
        self.store.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    made = [Engine(worker, tmp_path / str(worker)) for worker in (1, 2)]
    yield made
    for engine in made:
        engine.close()


def tokens_of(seed: int, blocks: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30_000, blocks * SIZE).tolist()


def eventually(ask: Callable[[], Any], expected: Any) -> None:
    until = time.monotonic() + 30
    while (found := ask()) != expected:
        assert time.monotonic() < until, found
        time.sleep(0.05)


# ── the selector ──────────────────────────────────────────────────────────────────────


async def registered(engines: list[Engine]) -> Any:
    from dynamo.llm import SelectionService  # pyright: ignore

    service = SelectionService()
    for engine in engines:
        await service.upsert_worker(
            {
                "worker_id": engine.worker,
                "model_name": "m",
                "endpoint": f"http://127.0.0.1:{9000 + engine.worker}",
                "block_size": SIZE,
                "kv_events_endpoints": {0: engine.publisher.address},
                "replay_endpoint": engine.publisher.replay_address,
                "data_parallel_size": 1,
            }
        )
    return service


async def blocks(service: Any, tokens: list[int]) -> dict[int, tuple[int, int, int]]:
    """Per worker, blocks on the device, with the host's, with the disk's."""
    scores = await service.overlap_scores({"model_name": "m", "token_ids": tokens})
    return {
        w["worker_id"]: (w["device_blocks"], w["host_pinned_blocks"], w["disk_blocks"])
        for w in scores["workers"]
        if w["disk_blocks"]
    }


async def settled(service: Any, tokens: list[int], expected: dict[int, tuple[int, int, int]]):
    until = time.monotonic() + 30
    while (found := await blocks(service, tokens)) != expected:
        assert time.monotonic() < until, found
        await asyncio.sleep(0.05)


async def selected(service: Any, tokens: list[int]) -> int:
    return (await service.select({"model_name": "m", "token_ids": tokens}))["worker_id"]


def test_the_instance_with_the_longest_prefix_is_selected_host_and_disk_included(
    engines: list[Engine],
):
    """A block in host memory counts for 0.75 of one on the device here, one on disk for 0.25."""
    first, second = engines
    shared = tokens_of(1, 8)

    async def story() -> None:
        service = await registered(engines)
        await asyncio.sleep(0.5)  # its subscriptions
        first.compute(shared[:SIZE])
        second.compute(tokens_of(2, 4))
        await settled(service, shared, {1: (1, 1, 1)})
        assert await selected(service, shared) == 1
        assert await selected(service, tokens_of(2, 5)) == 2

        second.compute(shared[: 6 * SIZE], save=True)
        second.push_off_device()
        await settled(service, shared, {1: (1, 1, 1), 2: (0, 6, 6)})
        assert await selected(service, shared) == 2

        second.push_out_of_host()
        await settled(service, shared, {1: (1, 1, 1), 2: (0, 0, 6)})
        assert await selected(service, shared) == 2

        second.push_off_disk()
        await settled(service, shared, {1: (1, 1, 1)})
        assert await selected(service, shared) == 1
        service.shutdown()

    asyncio.run(story())


def test_a_selector_that_comes_late_hears_the_past_from_replay(engines: list[Engine]):
    first, second = engines
    shared = tokens_of(1, 8)
    first.compute(shared[: 2 * SIZE])
    second.compute(shared[: 5 * SIZE], save=True)

    async def story() -> None:
        service = await registered(engines)
        await asyncio.sleep(0.5)
        for engine in engines:  # the first live batch shows the gap before it
            engine.compute(tokens_of(50 + engine.worker, 1))
        await settled(service, shared, {1: (2, 2, 2), 2: (5, 5, 5)})
        assert await selected(service, shared) == 2
        service.shutdown()

    asyncio.run(story())


# ── the indexer ───────────────────────────────────────────────────────────────────────


class Indexer:
    """Dynamo's indexer as a process; it hears the engines' live events."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> Any:
        """An answer; None while there is none."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return json.loads(answer.read())
        except (urllib.error.URLError, ConnectionError):
            return None

    def hears(self) -> list[str]:
        """How far it is with each engine's events."""
        workers = self.get("/workers") or []
        return [each["listeners"]["0"]["status"] for each in workers]

    def tokens(self, prompt: list[int]) -> dict[str, tuple[int, int, int, int]]:
        """Per worker the longest beginning, that on the device, with the host's, the disk's."""
        request = urllib.request.Request(
            self.url + "/query",
            json.dumps({"model_name": "m", "token_ids": prompt}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found = json.loads(answer.read())["instances"]
        names = "longest_matched", "gpu", "cpu", "disk"
        return {worker: tuple(each[name] for name in names) for worker, each in found.items()}  # pyright: ignore


@contextmanager
def indexer(engines: list[Engine], log: Path) -> Iterator[Indexer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = ",".join(f"{e.worker}={e.publisher.address}" for e in engines)
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
    command += ["--block-size", str(SIZE), "--model-name", "m", "--workers", workers]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        found = Indexer(f"http://127.0.0.1:{port}")
        eventually(found.hears, ["active"] * len(engines))
        time.sleep(0.5)  # a subscription's way to the publisher
        yield found
    finally:
        process.terminate()
        process.wait(30)


def test_the_indexer_counts_what_both_engines_hold_in_every_tier(
    engines: list[Engine], tmp_path: Path
):
    first, second = engines
    shared = tokens_of(1, 8)
    two, five = 2 * SIZE, 5 * SIZE
    with indexer(engines, tmp_path / "indexer.log") as found:
        first.compute(shared[:two])
        second.compute(shared[:five], save=True)
        on_device = {"1": (two, two, two, two), "2": (five, five, five, five)}
        eventually(lambda: found.tokens(shared), on_device)

        second.push_off_device()
        eventually(lambda: found.tokens(shared)["2"], (five, 0, five, five))
        second.push_out_of_host()
        eventually(lambda: found.tokens(shared)["2"], (five, 0, 0, five))
        second.push_off_disk()
        eventually(lambda: found.tokens(shared), {"1": (two, two, two, two)})
