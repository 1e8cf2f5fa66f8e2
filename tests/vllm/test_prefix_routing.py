"""`kvstow route-requests --by prefix` in front of two real servers with host and disk tiers.

What lies where is read from vLLM's own replay socket, as plain MessagePack. Whom the router chose
is said by its counters, and by both servers' counts of requests and of tokens that they did not
have to compute. Requests go one by one, so that no server is ever busier than the other.
"""

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
TIERS = {"device": DEVICE, "host": HOST, "disk": DISK}
TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def prompt(seed: int, count: int = HELD + 20) -> list[int]:
    return np.random.default_rng(1000 + seed).integers(100, 40_000, count).tolist()


def forked(seed: int) -> list[int]:
    """A prompt with the whole blocks of another one, and an end of its own."""
    return prompt(seed)[:HELD] + prompt(seed + 500, 30)


def until(is_so: Callable[[], bool], seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit, "it never came to be"
        time.sleep(0.2)


def metrics(url: str) -> dict[str, float]:
    """Every sample, by name and labels as they are printed; vLLM's with the names alone, summed."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0] if name.startswith("vllm:") else name
            found[name] = found.get(name, 0.0) + float(value)
    return found


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


# ── the router ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Answered:
    """Who answered a request, and how many tokens it had on its device or in its tiers."""

    engine: int
    device: float
    tiers: float


class Router:
    """A running router in front of the engines."""

    def __init__(self, url: str, engines: list[Engine]) -> None:
        self.url = url
        self.engines = engines

    def knows(self) -> bool:
        """Whether it has heard all that the engines have said."""
        found = metrics(self.url)
        return all(
            found.get(known(engine.server.url, tier), 0)
            == sum(medium in media for media in places.values())
            for engine in self.engines
            for places in [engine.places()]
            for tier, medium in TIERS.items()
        )

    def ask(self, path: str = "/v1/completions", **body: Any) -> Answered:
        """Send a request; who answered it by both servers' word, and by the router's."""
        before = [metrics(engine.server.url) for engine in self.engines]
        chosen = metrics(self.url)
        whole = {"model": "smollm2", "max_tokens": 2, "temperature": 0, **body}
        request = urllib.request.Request(
            self.url + path, json.dumps(whole).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=600).close()
        deltas: list[dict[str, float]] = []

        def is_counted() -> bool:
            deltas[:] = [
                {name: value - old.get(name, 0) for name, value in metrics(each.server.url).items()}
                for each, old in zip(self.engines, before, strict=True)
            ]
            return any(delta["vllm:request_success_total"] for delta in deltas)

        until(is_counted)
        (which,) = [i for i in (0, 1) if deltas[i]["vllm:request_success_total"]]
        said = {
            url: value - chosen.get(url, 0)
            for url, value in metrics(self.url).items()
            if url.startswith("kvstow_router_answers_total")
        }
        url = self.engines[which].server.url
        own = f'kvstow_router_answers_total{{kind="decode",url="{url}"}}'
        assert {name: value for name, value in said.items() if value} == {own: 1.0}
        hits = "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"
        return Answered(which, *(deltas[which][name] for name in hits))


def known(url: str, tier: str) -> str:
    return f'kvstow_router_prefix_blocks{{tier="{tier}",url="{url}"}}'


@contextmanager
def router(engines: list[Engine], logs: Path, *, replay: bool = True) -> Iterator[Router]:
    port = free_port()
    command = [sys.executable, "-m", "kvstow", "route-requests", "--port", str(port)]
    command += ["--by", "prefix", "--silence-seconds", "300"]
    for engine in engines:
        heard = f"{engine.events},{engine.replay}" if replay else engine.events
        command += ["--decode", engine.server.url, "--events", f"{engine.server.url}={heard}"]
    with (logs / f"router-{port}.log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: is_healthy(url))
        yield Router(url, engines)
    finally:
        process.terminate()
        process.wait(30)


def is_healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(url + "/health", timeout=5).close()
        return True
    except OSError:
        return False


# ── tests ─────────────────────────────────────────────────────────────────────────────


def test_requests_go_where_their_prefix_is_on_the_device(engines: list[Engine], logs: Path):
    owners = {10: 0, 11: 1, 12: 1, 13: 0, 14: 1, 15: 0, 16: 0, 17: 1}
    with router(engines, logs) as front:
        for seed, owner in owners.items():
            engines[owner].server.text(prompt(seed), max_tokens=2)
        until(front.knows)
        for seed in (15, 14, 17, 10, 16, 13, 11, 12):
            answered = front.ask(prompt=forked(seed))
            assert answered == Answered(owners[seed], HELD, 0), seed
        found = metrics(front.url)
        assert found['kvstow_router_prompt_tokens_total{where="held"}'] == 8 * HELD
        assert found['kvstow_router_prompt_tokens_total{where="not held"}'] == 8 * 30
        nowhere = [front.ask(prompt=prompt(seed)) for seed in (20, 21, 22, 23)]
    assert sorted(each.engine for each in nowhere) == [0, 0, 1, 1]  # in turn
    assert {(each.device, each.tiers) for each in nowhere} == {(0, 0)}


def test_texts_chats_and_salts_go_where_their_prefix_is(engines: list[Engine], logs: Path):
    text = {"prompt": TEXT + "Once upon a time"}
    chat = {"messages": [{"role": "user", "content": "Repeat after me: " + TEXT}]}
    salted = {"prompt": prompt(40), "cache_salt": "mine"}
    with router(engines, logs) as front:
        engines[1].server.ask(TEXT + "There was", max_tokens=2)
        body = {"model": "smollm2", "max_tokens": 2, **chat}
        engines[0].server.post("/v1/chat/completions", body)
        engines[0].server.text(prompt(40), max_tokens=2)
        engines[1].server.text(prompt(40), max_tokens=2, cache_salt="mine")
        until(front.knows)
        for _ in range(2):
            assert front.ask(**text).engine == 1
            assert front.ask("/v1/chat/completions", **chat).engine == 0
            assert front.ask(**salted) == Answered(1, HELD, 0)
            assert front.ask(prompt=prompt(40)) == Answered(0, HELD, 0)


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


def test_a_late_router_sends_requests_where_their_prefix_is_in_host_memory_or_on_disk_only(
    filled: Filled, logs: Path
):
    """All that this router knows at first was said before it began, and is replayed to it."""
    with router(filled.engines, logs) as front:
        until(front.knows)
        for which, medium in (
            *((0, HOST), (1, HOST), (1, DISK), (0, DISK)),
            *((1, HOST), (1, DISK), (0, DISK), (0, HOST)),
        ):
            seed = filled.take(which, medium)
            until(front.knows)
            assert front.ask(prompt=forked(seed)) == Answered(which, 0, HELD), (seed, medium)


def test_a_late_router_without_replay_knows_nothing_and_takes_turns(
    engines: list[Engine], logs: Path
):
    for seed in range(60, 64):
        engines[0].server.text(prompt(seed), max_tokens=2)
    engines[0].settled()  # what its tiers tell of these prompts was told before the router came
    with router(engines, logs, replay=False) as front:
        chosen = [front.ask(prompt=forked(seed)).engine for seed in range(60, 64)]
    assert chosen in ([0, 1, 0, 1], [1, 0, 1, 0])


# ── Dynamo ────────────────────────────────────────────────────────────────────────────


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
