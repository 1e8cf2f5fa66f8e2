"""Dynamo's selector in front of two real servers with host and disk tiers.

What lies where is read from vLLM's own replay socket, as plain MessagePack.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from serving import Launch, Server, free_port, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BLOCK = 128
ROW = 30 * 3 * 128 * 128 * 4
"""Bytes of a block of 128 tokens of SmolLM2-135M in float32."""

HELD = 2 * BLOCK
"""Tokens in whole blocks of a prompt."""

DEVICE_BLOCKS, HOST_BLOCKS = 20, 28
DEVICE, HOST, DISK = "GPU", "CPU", "STORAGE"


def prompt(seed: int, count: int = HELD + 20) -> list[int]:
    return np.random.default_rng(1000 + seed).integers(100, 40_000, count).tolist()


def forked(seed: int) -> list[int]:
    """A prompt with the whole blocks of another one, and an end of its own."""
    return prompt(seed)[:HELD] + prompt(seed + 500, 30)


# ── two servers ───────────────────────────────────────────────────────────────────────


class Engine:
    """A server, and what its events say."""

    def __init__(self, model: Path, store: Path) -> None:
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        published = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events.replace("127.0.0.1", "*"),
            "replay_endpoint": self.replay.replace("127.0.0.1", "*"),
        }
        self.launch = Launch(
            model=model,
            name="smollm2",
            settings={
                "host_bytes": HOST_BLOCKS * ROW,
                "disk_path": str(store),
                "disk_bytes": 2 << 30,
                "events": True,
            },
            options=(
                "--kv-events-config",
                json.dumps(published),
                "--num-gpu-blocks-override",
                str(DEVICE_BLOCKS),
            ),
        )
        self.server: Server

    def places(self) -> dict[tuple[int, ...], set[str]]:
        """Where each block lies, by all tokens up to its end: every event, heard from the first."""
        prefixes: dict[Any, tuple[int, ...]] = {None: ()}
        places: dict[tuple[int, ...], set[str]] = {}
        for payload in replayed(self.replay):
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "AllBlocksCleared":
                    for media in places.values():
                        media.discard(DEVICE)
                    continue
                is_stored = event["type"] == "BlockStored"
                if is_stored:
                    tokens, size = prefixes[event["parent_block_hash"]], event["block_size"]
                    for k, each in enumerate(event["block_hashes"]):
                        tokens += tuple(event["token_ids"][k * size : (k + 1) * size])
                        prefixes[each] = tokens
                for each in event["block_hashes"]:
                    media = places.setdefault(prefixes[each], set())
                    (media.add if is_stored else media.discard)(event["medium"])
        return places

    def settled(self) -> dict[tuple[int, ...], set[str]]:
        """Where each block lies, when nothing changes any more: tiers' events leave with steps."""
        places: dict[tuple[int, ...], set[str]] = {}
        for _ in range(60):
            time.sleep(1.0)  # tiers are looked at a few times a second
            self.server.text([7, 8, 9], max_tokens=4)
            before, places = places, self.places()
            if before == places and self.is_on_disk(places):
                return places
        raise AssertionError("the events do not end")

    def is_on_disk(self, places: dict[tuple[int, ...], set[str]]) -> bool:
        """Whether everything has reached the disk, which comes last."""
        return all(DISK in media for media in places.values() if media)


def replayed(address: str) -> list[bytes]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        found: list[bytes] = []
        while socket.poll(60_000):
            frames = socket.recv_multipart()
            if int.from_bytes(frames[-2], "big", signed=True) < 0:
                return found
            found.append(frames[-1])
    raise AssertionError("no end of the replay")


@pytest.fixture(scope="module")
def engines(
    smollm2: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("stores")
    made = [Engine(smollm2, folder / name) for name in "ab"]
    with running(*(engine.launch for engine in made), logs=logs) as servers:
        for engine, server in zip(made, servers, strict=True):
            engine.server = server
        yield made


NUM_FILLING = (HOST_BLOCKS + 12) // 2
"""Prompts that fill an engine's host memory, and drive six out of it."""


class Filled:
    """Engines whose prompts lie on the device, in host memory or on disk only."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self._asked: set[int] = set()
        for k in range(NUM_FILLING):
            for which, engine in enumerate(engines):
                engine.server.text(prompt(self.seeds(which)[k]), max_tokens=2)
        for engine in engines:
            engine.settled()

    @staticmethod
    def seeds(which: int) -> range:
        return range(100 * (1 + which), 100 * (1 + which) + NUM_FILLING)

    def take(self, which: int, medium: str) -> int:
        """A prompt of which an engine holds all blocks in that medium, and none above it: the
        latest, which is the last to be driven out."""
        wanted = {HOST: {HOST, DISK}, DISK: {DISK}}[medium]
        places = self.engines[which].settled()
        for seed in reversed(self.seeds(which)):
            blocks = [tuple(prompt(seed)[:end]) for end in (BLOCK, HELD)]
            if seed not in self._asked and all(places.get(each) == wanted for each in blocks):
                self._asked.add(seed)
                return seed
        raise AssertionError(f"no prompt of engine {which} lies in {medium} only")


@pytest.fixture(scope="module")
def filled(engines: list[Engine]) -> Filled:
    return Filled(engines)


def test_dynamos_selector_chooses_the_engine_that_holds_the_prefix_in_any_tier(filled: Filled):
    """It comes late, as routers do: what it knows of host memory and disks is replayed to it."""
    sys.path.append(str(Path(__file__).parents[2] / ".venv-dynamo"))
    llm = import_module("dynamo.llm")
    wanted = {
        (which, medium): filled.take(which, medium) for which in (0, 1) for medium in (DISK, HOST)
    }
    tiers = {DEVICE: (2, 2, 2), HOST: (0, 2, 2), DISK: (0, 0, 2)}

    async def scores(service: Any, tokens: list[int]) -> dict[int, tuple[int, int, int]]:
        """Per engine, blocks on the device, with the host's, with the disk's."""
        found = await service.overlap_scores({"model_name": "smollm2", "token_ids": tokens})
        names = "device_blocks", "host_pinned_blocks", "disk_blocks"
        return {
            each["worker_id"]: tuple(each[name] for name in names)  # pyright: ignore
            for each in found["workers"]
            if each["disk_blocks"]
        }

    async def story() -> None:
        service = llm.SelectionService()
        for which, engine in enumerate(filled.engines):
            await service.upsert_worker(
                {
                    "worker_id": which,
                    "model_name": "smollm2",
                    "endpoint": engine.server.url,
                    "block_size": BLOCK,
                    "kv_events_endpoints": {0: engine.events},
                    "replay_endpoint": engine.replay,
                    "data_parallel_size": 1,
                }
            )
        await asyncio.sleep(2)  # its subscriptions
        for which, engine in enumerate(filled.engines):  # a live batch shows the gap before it
            engine.server.text(prompt(300 + which), max_tokens=2)
            wanted[which, DEVICE] = 300 + which
        limit = time.monotonic() + 120
        for (which, medium), seed in wanted.items():
            tokens = forked(seed)
            while (found := await scores(service, tokens)) != {which: tiers[medium]}:
                assert time.monotonic() < limit, (seed, medium, found)
                await asyncio.sleep(0.2)
            chosen = await service.select({"model_name": "smollm2", "token_ids": tokens})
            assert chosen["worker_id"] == which, (seed, medium)
        service.shutdown()

    asyncio.run(story())
