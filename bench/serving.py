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
import sys
import tempfile
import time
from asyncio import Future, get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from machine import machine
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
async def running(*servers: Server) -> AsyncIterator[list[Server]]:
    """Servers that are ready; ended when the block is left, whatever happens."""
    try:
        for step in (Server.imported, Server.start, Server.ready, Server.listen):
            for server in servers:
                step(server)
        yield list(servers)
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
    ask: Ask | None = None,
) -> Figures:
    """The columns, what was moved, and how many of the first texts one engine gives otherwise."""
    before = await counted(servers)
    figures = await answers(ask or asker(servers), prompts, tokens, at_once)
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


@dataclass(frozen=True)
class Table:
    """What all tables need: the options of engines, the shape of the model, whom to tell."""

    chosen: argparse.Namespace
    folder: Path
    save: Callable[[str, Figures], None]

    @property
    def cpu(self) -> bool:
        return self.chosen.cpu

    def options(self, gib: int, tokens: int, **more: Any) -> EngineOptions:
        """On a GPU, so many GiB of cache and so many tokens per request; small ones on a CPU."""
        if self.cpu:
            more.pop("attention_backend", None)
            return EngineOptions(memory_bytes=64 << 20, max_tokens=1024, cpu=True, more=more)
        eager = self.chosen.eager
        return EngineOptions(memory_bytes=gib << 30, max_tokens=tokens, eager=eager, more=more)

    def model(self, config: dict[str, Any]) -> tuple[str, Prompts]:
        """A folder with the configuration, and prompts of its words."""
        if self.cpu:
            config = made_small(config)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder), Prompts(config["vocab_size"])

    async def each(self, variants: dict[str, Any], measure: Callable[..., Awaitable[None]]) -> None:
        """Measure the variants that were named, or all. One's failure is a result, too."""
        for name, variant in variants.items():
            if self.chosen.variants and name not in self.chosen.variants:
                continue
            figures: Figures = {}
            try:
                await measure(variant, figures)
            except Exception as error:
                figures["error"] = repr(error)[:500]
            self.save(name, figures)


async def packed(table: Table) -> None:
    """One connector, and the orders of the cache: all layers of a block in one row, or apart."""
    gpu = not table.cpu
    if gpu:
        model, prompts = table.model(QWEN)
    else:
        from kvstow.demo.weights import SMOLLM2, unpacked

        model, prompts = str(unpacked(SMOLLM2)), Prompts(40_000)
    lengths, loads = ((512, 2048, 8192), (1, 8, 32, 64)) if gpu else ((128, 512), (1, 4))
    tokens, used = (64, 1500) if gpu else (16, 20)
    more = {} if gpu else {"load_format": "auto"}
    options = replace(table.options(56, 9000, **more), **({} if gpu else {"memory_bytes": 1 << 29}))
    orders = {"rows": "BLHNC", "layers": "LBHNC"}
    variants = {
        f"kvstow, {way}, {name}": (connector("kvstow", layout=order, mapped=way == "mapped"), order)
        for way in ("mapped", "NIXL")
        for name, order in orders.items()
    }
    for name, order in orders.items():
        variants[f"NixlConnector, {name}"] = (connector("NixlConnector"), order)

    async def measure(variant: Any, figures: Figures) -> None:
        transfer, order = variant
        layout = {"VLLM_KV_CACHE_LAYOUT": order} if transfer["kv_connector"][0] == "N" else {}
        async with running(*pair(model, options, transfer, Server, **layout)) as servers:
            await scatter(servers, prompts, used)
            for length in lengths:
                await answers(asker(servers), [prompts(length) for _ in range(2)], 4, 1)
                for load in loads:
                    drawn = [prompts(length) for _ in range(max(8, 2 * load))]
                    done = await measured(servers, drawn, tokens, load)
                    figures[f"{length} tokens, {load} at once"] = done

    await table.each(variants, measure)


async def oss(table: Table) -> None:
    """gpt-oss-20b's shape: 32 requests of 400 tokens, 16 out, four or all at once."""
    shapes = {"gpt-oss": GPT_OSS, "dense with gpt-oss's cache": GPT_OSS_DENSE}
    transfers = {
        "kvstow": connector("kvstow"),
        "NixlPushConnector": connector("NixlPushConnector"),
        "one engine": None,
    }
    variants = {f"{s}, {t}": (shapes[s], transfers[t]) for s in shapes for t in transfers}
    options = table.options(12, 8192, attention_backend="TRITON_ATTN")

    async def measure(variant: Any, figures: Figures) -> None:
        config, transfer = variant
        model, prompts = table.model(config)
        made = pair(model, options, transfer, Server) if transfer else ()
        async with running(*made or [Server(5600, model, options, None)]) as servers:
            await scatter(servers, prompts, 20 if table.cpu else 1500)
            await answers(asker(servers), [prompts(400) for _ in range(2)], 16, 1)
            for load in (4, 32):
                drawn = [prompts(400) for _ in range(8 if table.cpu else 32)]
                figures[f"{load} at once"] = await measured(servers, drawn, 16, load)

    await table.each(variants, measure)


def drop_pages(folder: Path) -> None:
    """Write files out and have the system forget them: what is read next comes from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def offload(table: Table) -> None:
    """First tokens by length and by where a prompt's rows lie; throughput by share of hits."""
    model, prompts = table.model(LLAMA)
    cpu = table.cpu
    lengths = (64, 512) if cpu else (1024, 4096, 16384, 32768, 65536, 90000)
    first_host, host, disk = (8 << 20, 64 << 20, 1 << 30) if cpu else (16 << 30, 64 << 30, 44 << 30)
    repeats = 1 if cpu else 2
    cycle, length, requests = (24, 128, 48) if cpu else (160, 512, table.chosen.requests)
    first = table.options(16, 91_000)
    rates = replace(table.options(6, 2048), memory_bytes=2 << 20) if cpu else table.options(6, 2048)
    theirs = {"spec_name": "TieringOffloadingSpec", "block_size": BLOCK}

    def tiers(name: str, nbytes: int, folder: Path | None) -> dict[str, Any] | None:
        if name == "kvstow":
            below = {"disk_path": str(folder), "disk_bytes": disk} if folder else {}
            return connector(name, host_bytes=nbytes, **below)
        if name == "OffloadingConnector":
            if not folder:
                return connector(name, cpu_bytes_to_use=nbytes, block_size=BLOCK)
            below = {"secondary_tiers": [{"type": "fs", "root_dir": str(folder)}]}
            return connector(name, cpu_bytes_to_use=nbytes, **theirs, **below)
        return None

    async def first_tokens(name: str, figures: Figures) -> None:
        """A prompt is computed, asked for again, lost by the device, and lost by the host."""
        with tempfile.TemporaryDirectory(dir=table.folder) as store:
            server = Server(5900, model, first, tiers(name, first_host, Path(store)))
            async with running(server):
                drawn = {n: [prompts(n + 1) for _ in range(repeats)] for n in lengths}
                texts: dict[int, list[list[int]]] = {}
                for kind in ("cold", "device", "host", "disk")[: 2 if name == "none" else 4]:
                    if kind == "disk":
                        for _ in range(first_host // (64 << 20) + 1 if not cpu else 40):
                            await server.generate(prompts(512), 1)
                        await asyncio.sleep(5)
                        drop_pages(Path(store))
                    for n in lengths:
                        before = await counted([server])
                        done = []
                        for prompt in drawn[n]:
                            if kind in ("host", "disk"):
                                await server.forget()
                            done.append(await asker([server])(prompt, 8))
                            await asyncio.sleep(0.2)
                        found = [answer.text for answer in done]
                        ms = float(np.median([1000 * answer.ttft for answer in done]))
                        part = {"median_ttft_ms": round(ms, 2)}
                        part |= moved(before, await counted([server]))
                        if kind == "cold":
                            continued = await asker([server])(prompts(n + 1), 8)
                            part["warm_ttft_ms"] = round(1000 * continued.ttft, 2)
                        part["other_texts"] = sum(
                            a != b for a, b in zip(texts.get(n, found), found, strict=True)
                        )
                        texts[n] = found
                        figures.setdefault(kind, {})[str(n)] = part

    async def hit_rates(name: str, figures: Figures) -> None:
        """Of so many requests, some are of a cycle of prompts that the host holds and the device
        does not; the others are new."""
        async with running(Server(5900, model, rates, tiers(name, host, None))) as servers:
            again = [prompts(length + 1) for _ in range(cycle)]
            await answers(asker(servers), again, 1, 32)
            for rate in (0, 20, 40, 60, 80, 100) if name != "none" else (0,):
                draw, turn = Random(rate), count()
                jobs = [
                    again[next(turn) % cycle] if draw.random() < rate / 100 else prompts(length + 1)
                    for _ in range(requests)
                ]
                figures[f"{rate} %"] = await measured(servers, jobs, 1, 32)

    async def measure(name: str, figures: Figures) -> None:
        if "first tokens" in table.chosen.parts:
            await first_tokens(name, figures.setdefault("first tokens", {}))
        if "hit rates" in table.chosen.parts:
            await hit_rates(name, figures.setdefault("hit rates", {}))

    names = ("none", "kvstow") if cpu else ("none", "kvstow", "OffloadingConnector")
    await table.each({name: name for name in names}, measure)


async def conversations(table: Table) -> None:
    """Conversations of four turns of which a third fits, all turns of one number at once; with
    `--one-at-a-time` 14 of them, one request after the other."""
    model, prompts = table.model(LLAMA)
    cpu, single = table.cpu, table.chosen.one_at_a_time
    talks, turns = (14, 3) if single else (24, 4)
    if cpu:
        talks = 6
    begin, more, tokens = (200, 40, 8) if cpu else (6000, 600, 64)
    host = (256 << 20) if cpu else (40 << 30)
    small, large = (replace(table.options(gib, 10_000), memory_bytes=size)
                    for gib, size in ((8, 2 << 20), (40, 64 << 20))) if cpu else (
                    table.options(8, 10_000), table.options(40, 10_000))  # fmt: skip
    most = {"max_num_seqs": 1} if single else {}
    small, large = (replace(each, more=most) for each in (small, large))
    variants = {
        "none": (small, None),
        "kvstow": (small, connector("kvstow", host_bytes=host)),
        "OffloadingConnector": (
            small,
            connector("OffloadingConnector", cpu_bytes_to_use=host, block_size=BLOCK),
        ),
        "all fit": (large, None),
        "all fit, eight at a time": (replace(large, more={"max_num_seqs": 8}), None),
    }
    if cpu:
        variants.pop("OffloadingConnector")

    async def measure(variant: Any, figures: Figures) -> None:
        options, transfer = variant
        async with running(Server(5900, model, options, transfer)) as servers:
            rounds: list[list[float]] = []
            for _ in range(table.chosen.rounds):
                said = [prompts(begin) for _ in range(talks)]
                rounds.append([])
                later: list[Answer] = []
                for _ in range(turns):
                    done = await answers(asker(servers), said, tokens, talks)
                    rounds[-1].append(done["duration"])
                    texts = [answer.text for answer in done["answers"]]
                    said = [a + b + prompts(more) for a, b in zip(said, texts, strict=True)]
                    later += done["answers"] if len(rounds[-1]) > 1 else []
            figures["seconds of each turn, by round"] = rounds
            figures["turn 1, s"] = round(float(np.median([each[0] for each in rounds])), 3)
            figures["later turns, s"] = round(float(np.median([sum(r[1:]) for r in rounds])), 3)
            figures |= columns(later, sum(rounds[-1][1:]))
            figures |= moved({}, await counted(servers))

    await table.each(variants, measure)


async def peers(table: Table) -> None:
    """A prompt that engine A has just computed, asked of engine B: first tokens by length."""
    model, prompts = table.model(LLAMA)
    cpu = table.cpu
    lengths = (128, 512) if cpu else (2048, 4096, 8192, 16384, 32768, 48000)
    repeats, host = (2, 64 << 20) if cpu else (4, 16 << 30)
    options = table.options(16, 49_000)
    ports = (6310, 6320)

    def side(name: str, i: int) -> dict[str, Any] | None:
        if name == "kvstow":
            lend = [f"tcp://127.0.0.1:{port}" for port in ports]
            waits = {"peers_seconds": 10.0, "contact_seconds": 60.0} if cpu else {}
            peer = {"lend": lend[i], "peers": [lend[1 - i]]} | waits
            return connector(name, host_bytes=host, **peer)
        if name == "vLLM's p2p tier":
            tier = {"type": "p2p", "host": "127.0.0.1", "port": ports[i]}
            more = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
            return connector("OffloadingConnector", cpu_bytes_to_use=host, block_size=BLOCK, **more)
        return None

    async def measure(name: str, figures: Figures) -> None:
        sides = (
            Server(5900 + 10 * i, model, options, side(name, i), PYTHONHASHSEED="0")
            for i in range(2)
        )
        async with running(*sides) as (a, b):
            for n in (lengths[0], *lengths):  # the first is first contact: it is overwritten
                seconds, again, wrong, before = [], [], 0, await counted([b])
                for _ in range(repeats):
                    prompt = prompts(n + 1)
                    own = await a.generate(prompt, 8)
                    await asyncio.sleep(1.0)
                    source = {"kv_request_id": f"p{time.monotonic_ns()}"}
                    source |= {"remote_host": "127.0.0.1", "remote_port": ports[0]}
                    params = {"remote_kv_source": source} if name != "computed again" else {}
                    answer = await asker([b], **params)(prompt, 8)
                    seconds.append(1000 * answer.ttft)
                    wrong += answer.text != own["text"]
                    again.append(1000 * (await asker([b])(prompt, 8)).ttft)
                part = {
                    "median_ttft_ms": round(float(np.median(seconds)), 2),
                    "cached_ttft_ms": round(float(np.median(again)), 2),
                    "each_ms": [round(each, 1) for each in seconds],
                    "wrong_texts": wrong,
                }
                figures[str(n)] = part | moved(before, await counted([b]))

    names = ("computed again", "kvstow") + (() if cpu else ("vLLM's p2p tier",))
    await table.each({name: name for name in names}, measure)


TABLES = {each.__name__: each for each in (packed, oss, offload, conversations, peers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=[])
    parser.add_argument("--parts", nargs="+", default=["first tokens", "hit rates"])
    parser.add_argument("--requests", type=int, default=2000, help="of each hit rate")
    parser.add_argument("--rounds", type=int, default=3, help="of conversations")
    parser.add_argument("--one-at-a-time", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--try", dest="cpu", action="store_true", help="small, on a CPU")
    chosen = parser.parse_args()
    document: Figures = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
    document |= {"machine": machine(), "versions": versions()}
    document["command"] = " ".join(["python bench/serving.py", *sys.argv[1:]])

    def save(name: str, figures: Figures) -> None:
        document.setdefault("figures", {})[name] = figures
        print(f"{name}: {json.dumps(figures)}", flush=True)
        chosen.json.write_text(json.dumps(document, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(TABLES[chosen.table](Table(chosen, Path(folder), save)))


if __name__ == "__main__":
    main()
