"""Serving figures under the names of `vllm bench serve`, one table for each subcommand.

    python bench/serving.py packed --json FILE        packed rows against per-layer caches
    python bench/serving.py oss --json FILE           gpt-oss-20b's shape, beside one engine
    python bench/serving.py offload --json FILE       first tokens by where a prompt lies; hit rates
    python bench/serving.py conversations --json FILE turns of conversations that do not fit
    python bench/serving.py peers --json FILE         a prefix that another engine has

Requests go to vLLM's asynchronous engine, which `vllm serve` puts behind HTTP; with prefill and
decode, a request's time begins before prefill, as at a router. Weights are dummies, prompts random
token ids, answers of a fixed length. `transfers`, `descriptors` and `bytes` are the connectors' own
counters, of all engines together. `--variants` takes some columns of a table only; what a file has
of others is kept. With `--try`: on a CPU, small models, and SmolLM2-135M's weights for `packed`.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from asyncio import Future, get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from machine import as_text, machine
from vllm_engines import (
    BLOCK,
    GPT_OSS,
    GPT_OSS_DENSE,
    LLAMA,
    QWEN,
    EngineOptions,
    Prompts,
    Remote,
    as_request,
    connector,
    fill_weights,
    made_small,
    prepare,
    short_jobs,
    versions,
)
from vllm_pairs import HAND_OVER, pair

Figures = dict[str, Any]


# ── an engine that many ask at a time ─────────────────────────────────────────────────


def serve_requests(pipe: Connection, environment: dict[str, str], arguments: Any) -> None:
    """The body of an engine's process: answers calls by their number until it is told to end."""
    try:
        prepare(pipe, environment)
        asyncio.run(answer_calls(pipe, *arguments))
    except Exception as error:  # the other side shows it
        pipe.send(("failed", repr(error)))
        raise


async def answer_calls(
    pipe: Connection, model: str, options: EngineOptions, transfer: dict[str, Any] | None
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import AsyncEngineArgs

    given = options.arguments() | ({"kv_transfer_config": transfer} if transfer else {})
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **given))
    if given["load_format"] == "dummy":
        await engine.collective_rpc("apply_model", args=(fill_weights,))
    pipe.send(("ready", None))
    loop, ended = get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def call(number: int, job: dict[str, Any] | None, name: str) -> None:
        try:
            done: Any = await generate(engine, str(number), job) if job else await calls[name]()
            pipe.send((number, "ok", done))
        except Exception as error:  # the other side shows it
            pipe.send((number, "failed", repr(error)))

    async def counters() -> dict[str, float]:
        return all_counters()

    calls = {"counters": counters, "forget": engine.reset_prefix_cache}

    def read() -> None:
        try:
            while pipe.poll():
                if (message := pipe.recv()) == ("close",):
                    return ended.set()
                tasks.add(task := loop.create_task(call(*message)))
                task.add_done_callback(tasks.discard)
        except EOFError:  # whoever asked is gone
            ended.set()

    loop.add_reader(pipe.fileno(), read)
    await ended.wait()
    engine.shutdown()
    pipe.send(("ok", 0.0))


async def generate(engine: Any, key: str, job: dict[str, Any]) -> dict[str, Any]:
    """When tokens came, by a clock that all processes of a machine share; the text; parameters."""
    times: list[float] = []
    done: dict[str, Any] = {"times": times}
    async for output in engine.generate(*as_request(job), job.get("id", key)):
        times.append(time.perf_counter())
        done["text"] = list(output.outputs[0].token_ids)
        done["params"] = output.kv_transfer_params
    return done


def all_counters() -> dict[str, float]:
    """What the connectors have counted: kvstow's by their short names, vLLM's by their own."""
    from prometheus_client import REGISTRY

    from kvstow.adapters.vllm.counts import vllm_counts

    families = list(REGISTRY.collect())
    counters: dict[str, float] = dict(vllm_counts(families))
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith(("vllm:nixl_", "vllm:kv_offload_")) and "le" not in sample.labels:
            counters[sample.name] = counters.get(sample.name, 0.0) + sample.value
    return counters


class Server(Remote):
    """An engine in another process that answers many calls at a time."""

    body = staticmethod(serve_requests)

    def listen(self) -> None:
        """Hear answers, from now on, in the running loop."""
        self._numbers, self._waiting = count(), dict[int, Future[Any]]()
        get_running_loop().add_reader(self._pipe.fileno(), self._read)

    def _read(self) -> None:
        try:
            while self._pipe.poll():
                number, kind, value = self._pipe.recv()
                future = self._waiting.pop(number)
                if kind == "ok":
                    future.set_result(value)
                else:
                    future.set_exception(RuntimeError(value))
        except (EOFError, ConnectionError):
            get_running_loop().remove_reader(self._pipe.fileno())
            for future in self._waiting.values():
                future.set_exception(RuntimeError("the engine has ended"))

    async def call(self, name: str, job: dict[str, Any] | None = None) -> Any:
        number = next(self._numbers)
        self._waiting[number] = future = get_running_loop().create_future()
        self._pipe.send((number, job, name))
        return await asyncio.wait_for(future, 300)

    async def generate(self, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        return await self.call("", {"prompt": prompt, "max_tokens": max_tokens, **more})

    async def forget(self) -> None:
        """Forget what the device has cached; blocks that are still being stored are waited for."""
        for _ in range(300):
            if await self.call("forget"):
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the cache is in use")

    def close(self) -> float:
        """End it, also while answers are due: those are lost."""
        if hasattr(self, "_numbers"):
            get_running_loop().remove_reader(self._pipe.fileno())
        return super().close()


@asynccontextmanager
async def running(servers: list[Server]) -> AsyncIterator[None]:
    """Servers that are ready; ended when the block is left, whatever happens."""
    try:
        for step in (Server.start, Server.ready, Server.listen):
            for server in servers:
                step(server)
        yield
    finally:
        for server in servers:
            server.close()


# ── requests, and what is said of them ────────────────────────────────────────────────


@dataclass(frozen=True)
class Answer:
    """A request that is over: when it began, when tokens came, how long prompt and text are."""

    began: float
    times: list[float]
    prompt_tokens: int
    text: list[int]

    @property
    def ttft(self) -> float:
        return self.times[0] - self.began

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.times[-1] - self.times[0]) / (len(self.text) - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between one output and the next."""
        return np.diff(self.times).tolist()


Ask = Callable[[list[int], int], Awaitable[Answer]]
"""Asks for so many tokens after a prompt."""


def asker(servers: list[Server], **params: Any) -> Ask:
    """Asks one server, or two: prefill, and decode with what it has handed over."""
    numbers = count()

    async def ask(prompt: list[int], max_tokens: int) -> Answer:
        began, carried = time.perf_counter(), dict(params)
        key = f"q{os.getpid()}-{next(numbers)}-{time.monotonic_ns()}"  # both sides' id
        if len(servers) > 1:
            done = await servers[0].generate(prompt, 1, id=key, params=dict(HAND_OVER))
            carried = done["params"]
        done = await servers[-1].generate(prompt, max_tokens, id=key, params=carried)
        return Answer(began, done["times"], len(prompt), done["text"])

    return ask


async def answers(ask: Ask, prompts: Iterable[list[int]], tokens: int, at_once: int) -> Figures:
    """Ask for all of them, so many at once: the columns of `vllm bench serve`, and the answers."""
    free = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> Answer:
        async with free:
            return await ask(prompt, tokens)

    began = time.perf_counter()
    done = await asyncio.gather(*map(one, prompts), return_exceptions=True)
    seconds = time.perf_counter() - began
    good = [each for each in done if isinstance(each, Answer)]
    if not good:
        raise next(each for each in done if isinstance(each, BaseException))
    return columns(good, seconds) | {
        "max_concurrency": at_once,
        "failed": len(done) - len(good),
        "answers": good,
    }


def columns(done: list[Answer], seconds: float) -> Figures:
    """Under the names of `vllm bench serve`, and by its definitions."""
    inputs = sum(answer.prompt_tokens for answer in done)
    outputs = sum(len(answer.text) for answer in done)
    figures: Figures = {
        "duration": seconds,
        "completed": len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    for name, values in {
        "ttft": [answer.ttft for answer in done],
        "tpot": [answer.tpot for answer in done if len(answer.text) > 1],
        "itl": [gap for answer in done for gap in answer.itl],
    }.items():
        ms = 1000 * np.array(values or [0.0])
        figures[f"mean_{name}_ms"], figures[f"median_{name}_ms"] = ms.mean(), np.median(ms)
        figures[f"p99_{name}_ms"] = np.percentile(ms, 99)
    return {name: round(float(value), 3) for name, value in figures.items()}


async def counted(servers: list[Server]) -> dict[str, float]:
    """All servers' counters together, as soon as they stand still."""

    async def total() -> dict[str, float]:
        each = [await server.call("counters") for server in servers]
        return {name: sum(c.get(name, 0.0) for c in each) for c in each for name in c}

    last = None
    while last != (last := await total()):
        await asyncio.sleep(0.3)
    return last


MOVED = {
    "transfers": ("pulls accepted", "vllm:nixl_xfer_time_seconds_count"),
    "descriptors": ("pull_descriptors", "vllm:nixl_num_descriptors_sum"),
    "bytes": ("pulled_bytes", "vllm:nixl_bytes_transferred_sum"),
    "mapped": ("pull_paths mapped",),
    "restored_tokens": ("restored_tokens",),
    "loaded_bytes": ("vllm:kv_offload_load_bytes_total",),
    "stored_rows": ("stored_rows",),
    "stored_bytes": ("vllm:kv_offload_store_bytes_total",),
}


def moved(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was moved meanwhile, under one name for all connectors; what none has moved is left."""
    grown = {
        name: sum(after.get(key, 0.0) - before.get(key, 0.0) for key in keys)
        for name, keys in MOVED.items()
    }
    return {name: value for name, value in grown.items() if value}


async def measured(
    servers: list[Server],
    prompts: list[list[int]],
    tokens: int,
    at_once: int,
) -> Figures:
    """The columns, what was moved, and how many of the first texts one engine gives otherwise."""
    before = await counted(servers)
    figures = await answers(asker(servers), prompts, tokens, at_once)
    figures |= moved(before, await counted(servers))
    first = figures.pop("answers")
    if len(servers) > 1:
        own = [await servers[0].generate(prompt, tokens) for prompt in prompts[:2]]
        texts = [answer.text for answer in first[:2]]
        figures["wrong_texts"] = sum(a["text"] != b for a, b in zip(own, texts, strict=True))
    return figures


async def scatter(servers: list[Server], prompts: Prompts, requests: int) -> None:
    """Use pools, so that free blocks lie scattered as in service."""
    jobs = short_jobs(prompts, requests)
    free = asyncio.Semaphore(64)

    async def one(server: Server, job: dict[str, Any]) -> None:
        async with free:
            await server.generate(job["prompt"], job["max_tokens"])

    await asyncio.gather(*(one(server, job) for server in servers for job in jobs))


# ── the tables ────────────────────────────────────────────────────────────────────────


Measure = Callable[[list[Server], Figures], Awaitable[None]]


@dataclass(frozen=True)
class Column:
    """Servers that have not started, and what is measured of them."""

    name: str
    servers: list[Server]
    measure: Measure


@dataclass(frozen=True)
class Table:
    """What all tables need: what was chosen, and a folder."""

    chosen: argparse.Namespace
    folder: Path

    def pick(self, gpu: Any, cpu: Any) -> Any:
        """How much is measured on a GPU, and on a CPU."""
        return cpu if self.chosen.cpu else gpu

    def options(self, gib: int, tokens: int, *, blocks: int = 600, **more: Any) -> EngineOptions:
        """So many GiB of cache and tokens per request; on a CPU, so many blocks."""
        if self.chosen.cpu:
            more.pop("attention_backend", None)
            more |= {"num_gpu_blocks_override": blocks}
            return EngineOptions(memory_bytes=1 << 30, max_tokens=1024, cpu=True, more=more)
        eager = self.chosen.eager
        return EngineOptions(memory_bytes=gib << 30, max_tokens=tokens, eager=eager, more=more)

    def model(self, config: dict[str, Any]) -> tuple[str, Prompts]:
        """A folder with the configuration, and prompts of its words."""
        config = self.pick(config, made_small(config))
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder), Prompts(config["vocab_size"])

    def columns(
        self, variants: dict[str, Any], servers: Callable[[Any], list[Server]], measure: Measure
    ) -> list[Column]:
        """A column for each variant that was named, or for all; their servers' processes import
        vLLM side by side."""
        named = self.chosen.variants or variants
        return [
            Column(name, servers(variant), measure)
            for name, variant in variants.items()
            if name in named
        ]


def packed(table: Table) -> list[Column]:
    """One connector, and the orders of the cache: all layers of a block in one row, or apart."""
    model, prompts = table.model(QWEN)
    real = {}
    if table.chosen.cpu:
        from kvstow.demo.weights import SMOLLM2, unpacked

        model, prompts, real = str(unpacked(SMOLLM2)), Prompts(40_000), {"load_format": "auto"}
    lengths = table.pick((512, 2048, 8192), (128, 512))
    options = table.options(56, 9000, **real)
    orders = {"rows": "BLHNC", "layers": "LBHNC"}
    variants: dict[str, Any] = {
        f"kvstow, {way}, {name}": (connector("kvstow", layout=order, mapped=way == "mapped"), {})
        for way in ("mapped", "NIXL")
        for name, order in orders.items()
    }
    if table.chosen.cpu:  # on one GPU each of its hand-overs takes seconds
        for name, order in orders.items():
            layout = {"VLLM_KV_CACHE_LAYOUT": order}
            variants[f"NixlConnector, {name}"] = (connector("NixlConnector"), layout)

    def servers(variant: Any) -> list[Server]:
        transfer, layout = variant
        return pair(model, options, transfer, Server, **layout)

    async def measure(servers: list[Server], figures: Figures) -> None:
        await scatter(servers, prompts, table.pick(1500, 20))
        for length in lengths:
            await answers(asker(servers), [prompts(length) for _ in range(2)], 4, 1)
            for load in table.pick((1, 8, 32, 64), (1, 4)):
                drawn = [prompts(length) for _ in range(max(8, 2 * load))]
                done = await measured(servers, drawn, table.pick(64, 16), load)
                figures[f"{length} tokens, {load} at once"] = done

    return table.columns(variants, servers, measure)


def oss(table: Table) -> list[Column]:
    """gpt-oss-20b's shape: 32 requests of 400 tokens, 16 out, four or all at once."""
    shapes = {"gpt-oss": GPT_OSS, "dense with gpt-oss's cache": GPT_OSS_DENSE}
    transfers = {
        "kvstow": connector("kvstow"),
        "NixlPushConnector": connector("NixlPushConnector"),
        "one engine": None,
    }
    variants = {f"{s}, {t}": (shapes[s], transfers[t]) for s in shapes for t in transfers}
    options = table.options(12, 8192, attention_backend="TRITON_ATTN")

    prompts = table.model(GPT_OSS)[1]

    def servers(variant: Any) -> list[Server]:
        config, transfer = variant
        model, _ = table.model(config)
        one = [Server(5600, model, options, None)]
        return pair(model, options, transfer, Server) if transfer else one

    async def measure(servers: list[Server], figures: Figures) -> None:
        await scatter(servers, prompts, table.pick(1500, 20))
        await answers(asker(servers), [prompts(400) for _ in range(2)], 16, 1)
        for load in (4, 32):
            drawn = [prompts(400) for _ in range(table.pick(32, 8))]
            figures[f"{load} at once"] = await measured(servers, drawn, 16, load)

    return table.columns(variants, servers, measure)


def tiers(name: str, nbytes: int, folder: Path | None = None) -> dict[str, Any] | None:
    """A connector with so many bytes of host memory, and a folder below it."""
    if name == "kvstow":
        disk = {"disk_path": str(folder), "disk_bytes": 50 << 30} if folder else {}
        return connector(name, host_bytes=nbytes, **disk)
    if name == "OffloadingConnector":
        below: Figures = {}
        if folder:
            files = [{"type": "fs", "root_dir": str(folder)}]
            below = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": files}
        return connector(name, cpu_bytes_to_use=nbytes, block_size=BLOCK, **below)
    return None


async def settled(folder: Path) -> None:
    """Wait until nothing more is stored, and have the system forget the files: what is read next
    comes from the disk."""

    def sizes() -> dict[Path, int]:
        return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}

    last = None
    while last != (last := sizes()):
        await asyncio.sleep(2)
    os.sync()
    for path in last:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def offload(table: Table) -> list[Column]:
    """First tokens by length and by where a prompt's rows lie; throughput by share of hits."""
    model, prompts = table.model(LLAMA)
    gpu_names = ("none", "kvstow", "OffloadingConnector")
    names: tuple[str, ...] = table.pick(gpu_names, gpu_names[:2])

    stores = {name: Path(tempfile.mkdtemp(dir=table.folder)) for name in names}

    def tiered(name: str) -> list[Server]:
        host, options = table.pick(13 << 30, 8 << 20), table.options(16, 91_000)
        return [Server(5900, model, options, tiers(name, host, stores[name]))]

    async def first_tokens(name: str, servers: list[Server], figures: Figures) -> None:
        """Prompts are computed, asked for again, lost by the device, and lost by the host."""
        (server,), store = servers, stores[name]
        lengths = table.pick((1024, 4096, 16384, 32768, 90000), (64, 512))
        drawn = {n: [prompts(n + 1) for _ in range(2 if n < 20_000 else 1)] for n in lengths}
        texts: dict[int, list[list[int]]] = {}

        async def note(kind: str, n: int) -> None:
            before, done = await counted(servers), []
            for prompt in drawn[n]:
                if kind in ("host", "disk"):
                    await server.forget()
                done.append(await asker(servers)(prompt, 8))
            part: Figures = {
                "median_ttft_ms": round(float(np.median([1000 * each.ttft for each in done])), 2),
                "other_texts": sum(each.text not in texts.get(n, [each.text]) for each in done),
            }
            texts.setdefault(n, [each.text for each in done])
            figures.setdefault(kind, {})[str(n)] = part | moved(before, await counted(servers))

        await server.generate(prompts(500), 8)
        for n in lengths:
            for kind in ("cold", "device", "host")[: 2 if name == "none" else 3]:
                await note(kind, n)
            await settled(store)
        if name == "none":
            return
        for _ in range(table.pick(26, 12)):  # what pushes the rest out of host memory
            await server.generate(prompts(table.pick(4096, 512)), 1)
        await settled(store)
        for n in lengths:
            await note("disk", n)

    def hosted(name: str) -> list[Server]:
        transfer = tiers(name, table.pick(64 << 30, 64 << 20))
        return [Server(5900, model, table.options(6, 2048, blocks=40), transfer)]

    async def hit_rates(name: str, servers: list[Server], figures: Figures) -> None:
        """Of so many requests, some are of a cycle of prompts that the host holds and the device
        does not; the others are new."""
        cycle, length = table.pick((160, 512), (24, 128))
        requests = table.pick(table.chosen.requests, 48)
        again = [prompts(length + 1) for _ in range(cycle)]
        await answers(asker(servers), again, 1, 32)
        for rate in (0, 20, 40, 60, 80, 100) if name != "none" else (0,):
            draw, turn = Random(rate), count()
            jobs = [
                again[next(turn) % cycle] if draw.random() < rate / 100 else prompts(length + 1)
                for _ in range(requests)
            ]
            figures[f"{rate} %"] = await measured(servers, jobs, 1, 32)

    def part(name: str, measure: Callable[..., Awaitable[None]]) -> Measure:
        async def take(servers: list[Server], figures: Figures) -> None:
            await measure(name, servers, figures.setdefault(title, {}))

        title = "first tokens" if measure is first_tokens else "hit rates"
        return take

    return [
        column
        for title, servers, measure in (
            ("first tokens", tiered, first_tokens),
            ("hit rates", hosted, hit_rates),
        )
        if title in table.chosen.parts
        for name in names
        for column in table.columns({name: name}, servers, part(name, measure))
    ]


def conversations(table: Table) -> list[Column]:
    """Conversations of four turns of which a third fits, all turns of one number at once; with
    `--one-at-a-time` 14 of three turns, one request after the other."""
    model, prompts = table.model(LLAMA)
    single = table.chosen.one_at_a_time
    talks, turns = table.pick((14, 3) if single else (24, 4), (12, 4))
    first, more, tokens = table.pick((6000, 600, 64), (200, 40, 8))
    limits = {"max_num_seqs": 1} if single else {}
    small, large = (
        table.options(8, 10_000, blocks=40, **limits),
        table.options(40, 10_000, **limits),
    )
    host = table.pick(40 << 30, 256 << 20)
    names = table.pick(("none", "OffloadingConnector", "kvstow"), ("none", "kvstow"))
    variants = {name: (small, tiers(name, host)) for name in names}
    variants["all fit"] = (large, None)
    if not single:
        eight = table.options(40, 10_000, max_num_seqs=8)
        variants["all fit, eight at a time"] = (eight, None)
    else:
        variants = {f"{name}, one at a time": variant for name, variant in variants.items()}

    def servers(variant: Any) -> list[Server]:
        options, transfer = variant
        return [Server(5900, model, options, transfer)]

    async def measure(servers: list[Server], figures: Figures) -> None:
        rounds: list[list[float]] = []
        later: list[Answer] = []
        for _ in range(table.chosen.rounds):
            said = [prompts(first) for _ in range(talks)]
            rounds.append([])
            later = []
            for _ in range(turns):
                done = await answers(asker(servers), said, tokens, talks)
                rounds[-1].append(round(done["duration"], 3))
                texts = [answer.text for answer in done["answers"]]
                said = [a + b + prompts(more) for a, b in zip(said, texts, strict=True)]
                later += done["answers"] if len(rounds[-1]) > 1 else []
        figures["seconds of each turn, by round"] = rounds
        figures["turn 1, s"] = round(float(np.median([each[0] for each in rounds])), 3)
        figures["later turns, s"] = round(float(np.median([sum(r[1:]) for r in rounds])), 3)
        figures["later turns, last round"] = columns(later, sum(rounds[-1][1:]))
        figures["moved"] = moved({}, await counted(servers))

    return table.columns(variants, servers, measure)


def peers(table: Table) -> list[Column]:
    """A prompt that engine A has just computed, asked of engine B: first tokens by length."""
    model, prompts = table.model(LLAMA)
    lengths = table.pick((2048, 4096, 8192, 16384, 32768, 48000), (128, 512))
    host, options = table.pick(16 << 30, 64 << 20), table.options(16, 49_000)
    ports = (6310, 6320)

    def side(name: str, i: int) -> dict[str, Any] | None:
        lend = [f"tcp://127.0.0.1:{port}" for port in ports]
        waits = table.pick({}, {"peers_seconds": 10.0, "contact_seconds": 60.0})
        p2p = [{"type": "p2p", "host": "127.0.0.1", "port": ports[i]}]
        below = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": p2p, "block_size": BLOCK}
        return {
            "computed again": None,
            "kvstow": connector(
                "kvstow", host_bytes=host, lend=lend[i], peers=[lend[1 - i]], **waits
            ),
            "vLLM's p2p tier": connector("OffloadingConnector", cpu_bytes_to_use=host, **below),
        }[name]

    def servers(name: str) -> list[Server]:
        return [
            Server(5900 + 10 * i, model, options, side(name, i), PYTHONHASHSEED="0")
            for i in range(2)
        ]

    async def measure(servers: list[Server], figures: Figures, *, name: str) -> None:
        a, b = servers
        for n in (lengths[0], *lengths):  # first contact is overwritten by the second time
            first, again, wrong, before = [], [], 0, await counted([b])
            for _ in range(table.pick(4, 2)):
                prompt = prompts(n + 1)
                own = await a.generate(prompt, 8)
                await asyncio.sleep(1.0)  # it is stored meanwhile
                source = {"kv_request_id": f"p{time.monotonic_ns()}"}
                source |= {"remote_host": "127.0.0.1", "remote_port": ports[0]}
                params = {"remote_kv_source": source} if name != "computed again" else {}
                answer = await asker([b], **params)(prompt, 8)
                first.append(round(1000 * answer.ttft, 1))
                again.append(round(1000 * (await asker([b])(prompt, 8)).ttft, 1))
                wrong += answer.text != own["text"]
            part = {"median_ttft_ms": float(np.median(first)), "each_ms": first}
            part |= {"cached_ttft_ms": float(np.median(again)), "wrong_texts": wrong}
            figures[str(n)] = part | moved(before, await counted([b]))

    names = ("computed again", "kvstow", "vLLM's p2p tier")
    return [
        column
        for name in table.pick(names, names[:2])
        for column in table.columns({name: name}, servers, partial(measure, name=name))
    ]


TABLES = {each.__name__: each for each in (packed, oss, offload, conversations, peers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=[])
    parser.add_argument("--parts", nargs="+", default=["first tokens", "hit rates"])
    parser.add_argument("--requests", type=int, default=2000, help="of each hit rate")
    parser.add_argument("--rounds", type=int, default=2, help="of conversations")
    parser.add_argument("--one-at-a-time", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--try", dest="cpu", action="store_true", help="small, on a CPU")
    chosen = parser.parse_args()
    document: Figures = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
    document |= {"machine": machine(), "versions": versions()}
    document["command"] = " ".join(["python bench/serving.py", *sys.argv[1:]])

    def save(name: str, figures: Figures) -> None:
        kept = document.setdefault("figures", {}).setdefault(name, {})
        kept.pop("error", None)
        kept.update(figures)
        print(f"{name}: {json.dumps(figures)}", flush=True)
        chosen.json.write_text(as_text(document))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines end with us
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure_all(TABLES[chosen.table](Table(chosen, Path(folder))), save))


async def measure_all(columns: list[Column], save: Callable[[str, Figures], None]) -> None:
    """One column after the other. One's failure is a result, too."""
    servers = [server for column in columns for server in column.servers]
    try:
        for server in servers:
            server.imported()
        for column in columns:
            figures: Figures = {}
            try:
                async with running(column.servers):
                    await column.measure(column.servers, figures)
            except Exception as error:
                figures["error"] = repr(error)[:500]
            save(column.name, figures)
    finally:
        for server in servers:
            server.kill()


if __name__ == "__main__":
    main()
