# ruff: noqa: E402
"""The remote tier against the bare client of the same store, on this machine, in one run.

    PYTHONPATH=src python bench/remote.py [--rows N] [--rounds N] [--stores s3,redis] [--json FILE]

Servers are processes of this machine: SeaweedFS (S3), Valkey, Mooncake with one owner of memory.
Rows have 1 MiB. The tier adds a header and a checksum per layer and head to every row, and verifies
and copies what it reads; the bare client moves as many bytes as plain objects, with as many
requests under way. As in an engine, rows are looked up before they are stored or loaded: `put` and
`get` are timed without that, `get_cold` with it, and look-ups have figures of their own. Both take
turns, also in who is first; `ratio` is the best of all rounds against the best, so that other work
on the machine counts least, `ratio_median` the median of the ratios of neighbours, `cpu_ratio` that
of this process's processor time, servers left out. Loopback: rates are of this machine, ratios are
the point.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine
sys.path.append(os.path.join(sys.path[0], "tests"))  # for servers

import argparse
import asyncio
import ctypes
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench.machine import write

from kvstow.offload.remote.client import RemoteOptions, open_client
from kvstow.offload.remote.tier import RemoteTier
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.pack import Site, packed
from kvstow.plan.spec import LayerSpec
from servers import ACCESS_KEY, SECRET_KEY, Mooncake, Seaweed, ServerProcess, Valkey

SERVERS: dict[str, type[ServerProcess]] = {"s3": Seaweed, "redis": Valkey, "mooncake": Mooncake}
OPTIONS = RemoteOptions(budget=60.0, load=120.0, queue=1 << 30)


def layout(order: str = "BLHNC") -> Layout:
    """Rows of one MiB: 16 layers of 8 heads of 64 elements, bfloat16, 32 tokens per block."""
    layers = [
        LayerSpec.attention(f"layers.{i}", heads=8, head_dim=64, dtype="bf16", block_tokens=32)
        for i in range(16)
    ]
    site = Site(model="bench", order=order)
    identity = Identity.unverified("bench", model="bench")
    return packed(grouped(layers), num_slabs=4, site=site).identified(identity)


class BareS3:
    """obstore alone, with as many requests under way as our client has."""

    def __init__(self, server: ServerProcess) -> None:
        from obstore.store import S3Store

        assert isinstance(server, Seaweed)
        self._store = S3Store(
            server.bucket,
            prefix="bare",
            endpoint=f"http://127.0.0.1:{server.ports[3]}",
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        self._loop = asyncio.new_event_loop()

    def put(self, names: list[str], rows: list[np.ndarray]) -> None:
        import obstore

        async def one(name: str, row: np.ndarray) -> None:
            await obstore.put_async(self._store, name, row.data, use_multipart=False)

        self._all(one(name, row) for name, row in zip(names, rows, strict=True))

    def get(self, names: list[str], rows: list[np.ndarray]) -> None:
        import obstore

        async def one(name: str, row: np.ndarray) -> None:
            found = await obstore.get_async(self._store, name)
            row[:] = np.frombuffer(memoryview(await found.bytes_async()), np.uint8)

        self._all(one(name, row) for name, row in zip(names, rows, strict=True))

    def remove(self, names: list[str]) -> None:
        import obstore

        obstore.delete(self._store, names)

    def _all(self, work) -> None:
        gate = asyncio.Semaphore(64)

        async def gated(one) -> None:
            async with gate:
                await one

        async def gathered() -> None:
            await asyncio.gather(*(gated(one) for one in work))

        self._loop.run_until_complete(gathered())


class BareRedis:
    """redis-py alone: a pipeline of 16 rows at a time."""

    def __init__(self, server: ServerProcess) -> None:
        import redis

        self._redis = redis.Redis(port=server.ports[0])

    def put(self, names: list[str], rows: list[np.ndarray]) -> None:
        for at in range(0, len(names), 16):
            pipe = self._redis.pipeline(transaction=False)
            for name, row in zip(names[at : at + 16], rows[at : at + 16], strict=True):
                pipe.set(name, row.data)
            pipe.execute()

    def get(self, names: list[str], rows: list[np.ndarray]) -> None:
        for at in range(0, len(names), 16):
            pipe = self._redis.pipeline(transaction=False)
            for name in names[at : at + 16]:
                pipe.get(name)
            for row, data in zip(rows[at : at + 16], pipe.execute(), strict=True):
                row[:] = np.frombuffer(data, np.uint8)

    def remove(self, names: list[str]) -> None:
        self._redis.unlink(*names)


class BareMooncake:
    """Mooncake's client alone: batches of 16 rows through registered memory, copied out."""

    def __init__(self, server: ServerProcess) -> None:
        from mooncake.store import MooncakeDistributedStore

        master, metadata = (f"127.0.0.1:{port}" for port in server.ports[:2])
        self._store = MooncakeDistributedStore()
        url = f"http://{metadata}/metadata"
        assert not self._store.setup("127.0.0.1", url, 0, 16 << 20, "tcp", "", master)
        self._stage = np.zeros(16 << 20, np.uint8)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self._stage.data))
        assert not self._store.register_buffer(self._at, self._stage.nbytes)

    def put(self, names: list[str], rows: list[np.ndarray]) -> None:
        self._each(names, rows, put=True)

    def get(self, names: list[str], rows: list[np.ndarray]) -> None:
        self._each(names, rows, put=False)

    def remove(self, names: list[str]) -> None:
        self._store.batch_remove(names, True)

    def _each(self, names: list[str], rows: list[np.ndarray], *, put: bool) -> None:
        size = rows[0].nbytes
        for at in range(0, len(names), 16):
            part, views = names[at : at + 16], rows[at : at + 16]
            places = [self._stage[i * size : (i + 1) * size] for i in range(len(part))]
            addresses = [self._at + i * size for i in range(len(part))]
            if put:
                for place, row in zip(places, views, strict=True):
                    place[:] = row
            verb = self._store.batch_put_from if put else self._store.batch_get_into
            answers = verb(part, addresses, [size] * len(part))
            assert all(answer >= 0 for answer in answers), answers
            if not put:
                for place, row in zip(places, views, strict=True):
                    row[:] = place


BARE = {"s3": BareS3, "redis": BareRedis, "mooncake": BareMooncake}


def patient(url: str) -> str:
    """The URL with a time limit that a busy machine keeps."""
    return f"{url}{'&' if '?' in url else '?'}load=120"


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def timed_twice(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of processor time of this process."""
    cpu = time.process_time()
    seconds = timed(work)
    return seconds, time.process_time() - cpu


def in_turns(work: dict[str, Callable[[], object]], number: int) -> dict[str, tuple[float, float]]:
    """What each takes; the last is the first in every other round, since a server has memory at
    hand for whoever comes first."""
    order = list(work) if number % 2 else list(reversed(work))
    return {what: timed_twice(work[what]) for what in order}


def rates(name: str, server: ServerProcess, num_rows: int, rounds: int) -> dict[str, object]:
    """Put and get, bare and by the tier, in turns."""
    client, _ = open_client(patient(server.url))
    tier = RemoteTier(client, layout(), options=OPTIONS)
    bare = BARE[name](server)
    nbytes = tier.layout.row_bytes(0)
    dice = np.random.default_rng(0)
    rows = [dice.integers(0, 256, nbytes, np.uint8) for _ in range(num_rows)]
    into = [np.zeros(nbytes, np.uint8) for _ in range(num_rows)]
    seconds: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        keys = [f"{number}.{i}".encode() for i in range(num_rows)]
        names = [f"bare.{number}.{i}" for i in range(num_rows)]

        def stored(keys: list[bytes] = keys) -> None:
            assert tier.store(0, keys, rows).all()
            assert tier.flush(120)

        def loaded(keys: list[bytes] = keys) -> None:
            assert tier.load(0, keys, into).all(), (tier.misses.now, tier.writes.dropped.now)

        assert not tier.contains(0, keys).any()
        put = {"bare_put": lambda names=names: bare.put(names, rows), "tier_put": stored}
        get = {"bare_get": lambda names=names: bare.get(names, into), "tier_get": loaded}
        cold = {f"{what}_cold": work for what, work in get.items()}
        taken = in_turns(put, number)
        tier._look_ups.forget(0, keys)  # pyright: ignore
        taken |= in_turns(cold, number)
        assert tier.contains(0, keys).all()
        taken |= in_turns(get, number)
        assert tier.writes.dropped.now == {}
        assert (into[-1] == rows[-1]).all()
        if number:  # the first round connects and warms up
            for what, took in taken.items():
                seconds.setdefault(what, []).append(took)
        client.delete([tier._name(0, key) for key in keys])  # pyright: ignore
        bare.remove(names)
        tier.evict(0, [])
    found: dict[str, object] = {"rows": num_rows, "row_bytes": nbytes, "rounds": rounds}
    for verb in ("put", "get", "get_cold"):
        plain, plain_cpu = zip(*seconds[f"bare_{verb}"], strict=True)
        ours, ours_cpu = zip(*seconds[f"tier_{verb}"], strict=True)
        found[verb] = {
            "bare_mb_per_second": round(num_rows * nbytes / min(plain) / 1e6, 1),
            "tier_mb_per_second": round(num_rows * nbytes / min(ours) / 1e6, 1),
            "ratio": round(min(plain) / min(ours), 3),
            "ratio_median": round(
                statistics.median(p / o for p, o in zip(plain, ours, strict=True)), 3
            ),
            "cpu_ratio": round(statistics.median(plain_cpu) / statistics.median(ours_cpu), 3),
        }
    tier.close()
    return found


def look_ups(server: ServerProcess, rounds: int) -> dict[str, float]:
    """Rows looked up per second that are there, and that are not, 512 at a time."""
    client, _ = open_client(patient(server.url))
    tier = RemoteTier(client, layout(), options=OPTIONS)
    row = [np.zeros(tier.layout.row_bytes(0), np.uint8)]
    keys = [f"look {i}".encode() for i in range(64)] * 8
    for key in dict.fromkeys(keys):
        tier.store(0, [key], row)
    tier.flush(60)
    distinct = list(dict.fromkeys(keys))
    hits, misses = [], []
    for number in range(rounds):
        tier._look_ups.forget(0, distinct)  # pyright: ignore
        hits.append(len(distinct) / timed(lambda: tier.contains(0, distinct)))
        strange = [f"{number} {i}".encode() for i in range(512)]
        misses.append(1 / timed(lambda strange=strange: tier.contains(0, strange)))
    tier.close()
    return {
        "found_rows_per_second": round(max(hits)),
        "unknown_prompts_per_second": round(max(misses)),
    }


def dead(server: ServerProcess) -> dict[str, float]:
    """What a request costs when the store has died: the first one, and those after it."""
    client, _ = open_client(server.url)
    options = RemoteOptions(budget=0.25, load=1.0)
    tier = RemoteTier(client, layout(), options=options)
    row = [np.zeros(tier.layout.row_bytes(0), np.uint8)]
    tier.store(0, [b"here"], row)
    tier.flush(60)
    server.stop()  # hangs: worse than a port that refuses
    keys = [f"asked {i}".encode() for i in range(128)]
    first = timed(lambda: tier.contains(0, keys))
    while not tier.breaker.is_open:  # a few look-ups cost their budget, too
        tier.contains(0, keys)
    later = [timed(lambda: tier.contains(0, keys)) for _ in range(1000)]
    server.go_on()
    tier.close()
    return {
        "budget_seconds": options.budget,
        "first_seconds": round(first, 4),
        "later_microseconds": round(statistics.median(later) * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stores", default="s3,redis,mooncake")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[str, object] = {}
    for name in asked.stores.split(","):
        with tempfile.TemporaryDirectory() as folder:
            options = {"mooncake": ("1 GB",), "redis": ("--appendonly", "no")}.get(name, ())
            with SERVERS[name](Path(folder), *options) as server:
                one = rates(name, server, asked.rows, asked.rounds)
                one["look_ups"] = look_ups(server, asked.rounds)
                one["dead"] = dead(server)
                found[name] = one
                print(name, one, file=sys.stderr, flush=True)
    write(asked.json, found)


main()
