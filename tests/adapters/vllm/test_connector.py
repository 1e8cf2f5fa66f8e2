"""The connector between vLLM's calls and our two sides, under stand-ins of vLLM's base classes.

Only what the connector inherits or receives is stood in for; vLLM itself is in tests/vllm.
"""

import json
import logging
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from typer.testing import CliRunner

from kvstow.adapters.vllm.protocol import OURS
from kvstow.adapters.vllm.scheduler.events import check_published
from kvstow.cli import app
from kvstow.errors import SpecError
from kvstow.events.format import BlockStored, CacheEvent
from kvstow.offload.disk.tier import DiskTier
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.local import Fabric, LocalTransport

BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
TOKENS, HEADS, CONTENT, NUM_BLOCKS = 4, 2, 8, 24
PAGE = HEADS * TOKENS * CONTENT * 4
PROMPT = list(range(500, 518))
HASHES = [bytes(24) + (0xFEED0000 + k).to_bytes(8, "big") for k in range(4)]


class StandInBase:
    """What `KVConnectorBase_V1` does for its subclasses."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def bind_kv_cache_manager(self, manager: Any) -> None:
        self._kv_cache_manager = manager
        self.bind_gpu_block_pool(manager.block_pool)  # pyright: ignore

    def _get_connector_metadata(self) -> Any:
        return self._metadata


class StandInMetrics:
    """What `KVConnectorPromMetrics` does for its subclasses."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: dict[int, Any]
    ) -> None:
        self._counter_cls = metric_types[Counter]
        self._gauge_cls = metric_types[Gauge]
        self._histogram_cls = metric_types[Histogram]
        self.per_engine_labelvalues = per_engine


@dataclass
class StandInStats:
    """What `KVConnectorStats` does for its subclasses."""

    data: dict[str, Any]


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class HitSource(Enum):
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


class Status(Enum):
    FINISHED_STOPPED = 0
    FINISHED_LENGTH_CAPPED = 1
    FINISHED_ABORTED = 2


@dataclass
class TransferResults:
    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


class StandInCore:
    """What vLLM's engine core does with a weight version, and steps of which the caller says what
    they compute and give."""

    engines_running = False

    def __init__(self, connector: Any, take_step: Callable[[], tuple[Any, bool]] = tuple) -> None:
        self.scheduler = SimpleNamespace(
            get_kv_connector=lambda: connector, has_requests=lambda: True
        )
        self.take_step = take_step

    def set_weight_version(self, weight_version: str) -> None:
        self.weight_version = weight_version

    def step(self) -> tuple[Any, bool]:
        return self.take_step()

    def step_with_batch_queue(self) -> tuple[Any, bool]:
        return self.take_step()


class CoreProcess(StandInCore):
    """A core in a process of its own: others ask it, and hear from it, by queues."""

    def __init__(self, connector: Any, take_step: Callable[[], tuple[Any, bool]]) -> None:
        super().__init__(connector, take_step)
        self.input_queue: Queue[str] = Queue()
        self.output_queue: Queue[tuple[int, str]] = Queue()
        self.runs = True

    def is_running(self) -> bool:
        return self.runs


def engine_cores() -> dict[str, object]:
    """Classes of their own for each test: they are changed."""
    core = type("EngineCore", (StandInCore,), {})
    return {"EngineCore": core, "EngineCoreProc": type("EngineCoreProc", (core, CoreProcess), {})}


def stand_ins() -> dict[str, ModuleType]:
    named: dict[str, dict[str, object]] = {
        f"{BASE}.base": {
            "KVConnectorBase_V1": StandInBase,
            "KVConnectorRole": Role,
            "KVConnectorTransferResults": TransferResults,
            "SupportsHMA": type("SupportsHMA", (), {}),
            **{
                name: type(name, (), {})
                for name in (
                    "KVConnectorHandshakeMetadata",
                    "KVConnectorMetadata",
                    "KVConnectorWorkerMetadata",
                )
            },
        },
        f"{BASE}.metrics": {
            "KVConnectorPromMetrics": StandInMetrics,
            "KVConnectorStats": StandInStats,
        },
        "vllm.v1.request": {"RequestStatus": Status},
        "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": HitSource},
        "vllm.v1.engine.core": engine_cores(),
    }
    modules: dict[str, ModuleType] = {}
    for path, content in named.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            modules.setdefault(name, ModuleType(name))
        vars(modules[path]).update(content)
    return modules


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`kvstow.adapters.vllm.connector`, over an engine of its own for rows in one process."""
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("bases", "metrics", "connector"):
        monkeypatch.delitem(sys.modules, f"kvstow.adapters.vllm.{name}", raising=False)
    import kvstow.adapters.vllm.connector as made

    fabric = Fabric()
    monkeypatch.setattr(made, "NixlTransport", lambda listen: LocalTransport(fabric))
    monkeypatch.setattr(made, "check_sleep", lambda *given: None)
    monkeypatch.setattr(
        made, "check_engine", lambda *given: None
    )  # tests/vllm has the real classes
    yield made
    for engine in Engine.running:
        engine.end()
    Engine.running.clear()
    for name in ("bases", "metrics", "connector"):
        del sys.modules[f"kvstow.adapters.vllm.{name}"]


class FullAttentionSpec:
    """By this very name vLLM declares a layer with full attention."""

    dtype = torch.float32
    tokens_per_state = 1
    state_content_size_bytes = CONTENT * 4
    block_size = num_states = TOKENS
    num_heads = HEADS
    num_head_slots = None


def vllm_config(*, publishes: bool = True, **options: object) -> SimpleNamespace:
    given = {"unverified": "a test", "digest": "always", **options}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=given, engine_id="engine", is_kv_consumer=True
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            rank=0,
        ),
        model_config=SimpleNamespace(
            model="/models/tiny", dtype=torch.float32, get_total_num_kv_heads=lambda: HEADS
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        num_prefill_lookahead_tokens=0,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=publishes),
    )


def cache_config() -> SimpleNamespace:
    group = SimpleNamespace(
        enable_kv_transfer=True,
        host_resident=False,
        layer_names=["a", "b"],
        kv_cache_spec=FullAttentionSpec(),
    )
    rows = SimpleNamespace(
        layers=["a", "b"],
        size=2 * PAGE * NUM_BLOCKS,
        layer_stride=PAGE,
        block_stride=2 * PAGE,
        offset=0,
    )
    return SimpleNamespace(
        kv_cache_groups=[group],
        kv_cache_layout="BLHNC",
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[rows],
        transfer_group_ids=(0,),
        hash_block_size=TOKENS,
        needs_kv_cache_zeroing=False,
    )


def memory() -> dict[str, torch.Tensor]:
    raw = torch.rand(2 * PAGE * NUM_BLOCKS // 4)
    strides = (2 * PAGE // 4, TOKENS * CONTENT, CONTENT, 1)
    shape = (NUM_BLOCKS, HEADS, TOKENS, CONTENT)
    return {name: raw.as_strided(shape, strides, i * PAGE // 4) for i, name in enumerate("ab")}


def request(id: str, **changed: object) -> SimpleNamespace:
    """A request with what the connector looks at."""
    given: dict[str, object] = {
        "request_id": id,
        "all_token_ids": PROMPT,
        "kv_transfer_params": None,
        "kv_hints": None,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": None,
        "prompt_embeds": None,
        "resumable": False,
        "block_hashes": HASHES,
        "skip_reading_prefix_cache": True,  # what is pulled before a request is planned: test_early
        "status": Status.FINISHED_LENGTH_CAPPED,
        "num_computed_tokens": len(PROMPT),
        "num_in_flight_tokens": 0,
        "num_tokens": len(PROMPT) + 1,
    }
    return SimpleNamespace(**given | changed)


def blocks(ids: Sequence[int]) -> SimpleNamespace:
    """What vLLM says of the blocks that it has given a request."""
    return SimpleNamespace(get_block_ids=lambda: (ids,))


def plan(computes: dict[str, int] | None = None, ids: Sequence[int] = ()) -> SimpleNamespace:
    """A step that computes so many tokens of requests, in these blocks."""
    computes = computes or {}
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(computes.values()),
        num_scheduled_tokens=computes,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda id: (list(ids),)),
    )


def told(report: Any = None, sent: Any = None, invalid: Any = frozenset[int]()) -> SimpleNamespace:
    """What vLLM tells the scheduler's connector of its workers; `invalid` are blocks that another
    connector has failed to load."""
    return SimpleNamespace(
        kv_connector_worker_meta=report, finished_sending=sent, invalid_block_ids=invalid
    )


class BlockPool:
    """References to blocks, as vLLM's pool counts them."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(ref_cnt=0) for _ in range(NUM_BLOCKS)]

    def touch(self, blocks: Sequence[SimpleNamespace]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[SimpleNamespace]) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    @property
    def held(self) -> list[int]:
        return [id for id, block in enumerate(self.blocks) if block.ref_cnt]


class CacheManager:
    """vLLM's own cache: it can be reset while no block is in use."""

    def __init__(self) -> None:
        self.block_pool = BlockPool()
        self.num_resets = 0

    def reset_prefix_cache(self) -> bool:
        is_idle = not self.block_pool.held
        self.num_resets += is_idle
        return is_idle


class Engine:
    """Two connectors of one engine, whose scheduler and worker share a process or do not. It ends
    with the test."""

    running: ClassVar[list["Engine"]] = []

    def __init__(
        self, connector: ModuleType, *, in_process: bool = True, **options: object
    ) -> None:
        Engine.running.append(self)
        given = vllm_config(**options), cache_config()
        self.views = memory()
        self.scheduler = connector.KvstowConnector(given[0], Role.SCHEDULER, given[1])
        self.worker = connector.KvstowConnector(given[0], Role.WORKER, given[1])
        self.worker.register_kv_caches(self.views)
        self.introduce(in_process=in_process)
        self.cache = CacheManager()
        self.pool = self.cache.block_pool
        self.scheduler.bind_kv_cache_manager(self.cache)

    def end(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def introduce(self, *, in_process: bool) -> None:
        """The scheduler's connector meets the worker's."""
        metadata = self.worker.get_handshake_metadata()
        metadata = metadata if in_process else pickle.loads(pickle.dumps(metadata))
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})

    def set_weight_version(self, name: str) -> None:
        """What a user tells vLLM."""
        from vllm.v1.engine.core import EngineCore  # pyright: ignore

        EngineCore(self.scheduler).set_weight_version(name)  # pyright: ignore

    def prefill(self) -> dict[str, object]:
        """What a prefill's answer carries."""
        asking = request("p", kv_transfer_params={"do_remote_decode": True})
        stays, params = self.scheduler.request_finished_all_groups(asking, ([7, 8, 9, 10, 11],))
        assert stays
        assert params is not None
        return params

    def decode(self, params: dict[str, object], ids: list[int], id: str = "d") -> None:
        asking = request(id, kv_transfer_params=params)
        self.scheduler.on_new_request(asking)
        count = len(PROMPT) - 1
        assert self.scheduler.get_num_new_matched_tokens(asking, 0) == (count, True)
        self.scheduler.update_state_after_alloc(asking, blocks(ids), count)
        sources = self.scheduler.get_external_cache_hit_sources(asking, count)
        assert sources == {HitSource.P2P: count}

    def compute(self, asking: SimpleNamespace, ids: list[int]) -> TransferResults:
        """A step that computes a whole prompt in these blocks, and the request's end."""
        self.scheduler.on_new_request(asking)
        count, beside = self.scheduler.get_num_new_matched_tokens(asking, 0)
        assert not beside
        self.scheduler.update_state_after_alloc(asking, blocks(ids), count)
        asking.num_computed_tokens = count
        results = self.step({asking.request_id: len(PROMPT) - count}, ids)
        asking.num_computed_tokens = len(PROMPT)
        assert self.scheduler.request_finished_all_groups(asking, (ids,)) == (False, None)
        return results

    def step(
        self,
        computes: dict[str, int] | None = None,
        ids: Sequence[int] = (),
        *,
        invalid: frozenset[int] = frozenset(),
    ) -> Any:
        orders = self.scheduler.build_connector_meta(plan(computes, ids))
        self.worker.bind_connector_metadata(pickle.loads(pickle.dumps(orders)))
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        report = self.worker.build_connector_worker_meta()
        self.scheduler.update_connector_output(told(report, results.finished_sending, invalid))
        return results


def loaded(decode: Engine, *others: Engine) -> TransferResults:
    for _ in range(5000):
        for other in others:
            other.step()
        if (results := decode.step()).finished_recving:
            return results
    raise AssertionError("the load never ended")


@pytest.mark.parametrize("in_process", [True, False])
def test_a_prompt_is_handed_over_through_vllms_calls(connector: ModuleType, in_process: bool):
    """An engine in one process is not stepped again once it has given its tickets out."""
    prefill = Engine(connector, in_process=in_process)
    decode = Engine(connector, in_process=in_process)
    here = [1, 2, 3, 13, 12]
    decode.decode(prefill.prefill(), here)
    results = loaded(decode) if in_process else loaded(decode, prefill)
    assert (results.finished_recving, results.failed_recving) == ({"d"}, set())
    for there, own in zip([7, 8, 9, 10, 11], here, strict=True):
        assert torch.equal(decode.views["b"][own], prefill.views["b"][there])


class SlidingWindowSpec(FullAttentionSpec):
    """By this very name vLLM declares a layer with a window."""

    sliding_window = 8


@pytest.mark.parametrize(("spec", "left"), [(FullAttentionSpec, 0), (SlidingWindowSpec, 1)])
def test_prefill_leaves_the_last_token_to_decode_where_a_window_passes_on(
    connector: ModuleType, spec: type[FullAttentionSpec], left: int
):
    """vLLM lets go of the blocks that only the last token sees before it hands them over."""
    config = cache_config()
    config.kv_cache_groups[0].kv_cache_spec = spec()
    scheduler = connector.KvstowConnector(vllm_config(), Role.SCHEDULER, config)
    given = PROMPT.copy()
    asking = request(
        "p",
        kv_transfer_params={"do_remote_decode": True},
        prompt_token_ids=given,
        num_prompt_tokens=len(PROMPT),
        max_tokens=1,
    )
    asking.all_token_ids = asking._all_token_ids = PROMPT.copy()
    for _ in ("queued", "queued again after it was preempted"):
        scheduler.on_new_request(asking)
    assert given == PROMPT
    assert asking.num_prompt_tokens == len(PROMPT) - left
    assert asking.prompt_token_ids == asking.all_token_ids == PROMPT[: len(PROMPT) - left]


def test_an_aborted_request_hands_nothing_over(connector: ModuleType):
    scheduler = connector.KvstowConnector(vllm_config(), Role.SCHEDULER, cache_config())
    asking = request(
        "p", kv_transfer_params={"do_remote_decode": True}, status=Status.FINISHED_ABORTED
    )
    assert scheduler.request_finished_all_groups(asking, ([1, 2],)) == (False, None)


# ── tiers ─────────────────────────────────────────────────────────────────────────────


def drained(engine: Engine) -> None:
    """Steps for as long as the engine is told that there is work."""
    until = time.monotonic() + 20
    while engine.scheduler.has_pending_push_work() and time.monotonic() < until:
        engine.step()
    assert engine.pool.held == []


def asked(engine: Engine, ids: list[int]) -> Any:
    """A request whose first 16 tokens the engine loads, beside its steps: the load's results."""
    asking = request("d")
    engine.scheduler.on_new_request(asking)
    assert engine.scheduler.get_num_new_matched_tokens(asking, 0) == (16, True)
    engine.scheduler.update_state_after_alloc(asking, blocks(ids), 16)
    sources = engine.scheduler.get_external_cache_hit_sources(asking, 16)
    assert sources == {HitSource.HOST: 16}
    return loaded(engine)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_prompt_is_stored_in_its_step_and_comes_back_beside_others(
    connector: ModuleType, in_process: bool
):
    """Never before a step computes: vLLM plans ahead, and cannot undo a step that used a load
    which failed."""
    engine = Engine(connector, in_process=in_process, host_bytes=1 << 20)
    there, here = [7, 8, 9, 10, 11], [1, 2, 3, 13, 12]
    kept = engine.views["b"].clone()
    engine.compute(request("p"), there)
    assert engine.pool.held == there[:4]
    drained(engine)
    engine.views["b"].zero_()
    results = asked(engine, here)
    assert (results.finished_recving, results.failed_recving) == ({"d"}, set())
    for one, other in zip(there[:4], here[:4], strict=True):
        assert torch.equal(engine.views["b"][other], kept[one])
    assert engine.worker._worker_side.counts["restored_tokens"] == 16


def test_a_request_whose_rows_went_away_has_failed_to_load(connector: ModuleType):
    engine = Engine(connector, host_bytes=1 << 20)
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    drained(engine)
    (tiers,) = [p for p in engine.worker._worker_side.parts if hasattr(p, "host")]
    host = tiers.host
    host.evict(0, host.keys(0)[2:3])
    results = asked(engine, [1, 2, 3, 13, 12])
    assert (results.finished_recving, results.failed_recving) == ({"d"}, {"d"})
    assert engine.worker._worker_side.counts["restore_failures"] == 1


def test_a_request_that_pins_its_rows_finds_them_whatever_came_since(connector: ModuleType):
    engine = Engine(connector, host_bytes=17 * 2 * PAGE)
    hints = {"actions": [{"action_type": "kv.pin"}, {"action_type": "kv.other"}]}
    engine.compute(request("p", kv_hints=hints), [7, 8, 9, 10, 11])
    drained(engine)
    time.sleep(0.6)  # rows that were on their way are pinned with the next look
    engine.step()
    for k in range(6):
        engine.compute(request(f"o{k}", all_token_ids=[k] * len(PROMPT)), [1, 2, 3, 4, 5])
        drained(engine)
    assert found(engine) == 16
    counts = engine.scheduler._scheduler.counts
    assert (counts["hints pin"], counts["hints other"]) == (1, 1)


# ── sleep ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("in_process", [True, False])
def test_an_engine_that_has_slept_hands_over_again_and_finds_its_rows(
    connector: ModuleType, in_process: bool
):
    """The cache's memory goes and comes back empty; rows in host memory stay."""
    prefill = Engine(connector, in_process=in_process, host_bytes=1 << 20)
    decode = Engine(connector, in_process=in_process)
    prefill.compute(request("p"), [7, 8, 9, 10, 11])
    drained(prefill)
    kept = prefill.views["b"].clone()
    stale = prefill.prefill()
    old = prefill.worker.get_handshake_metadata().endpoint
    for _ in range(2):  # vLLM may say so twice
        prefill.worker.unregister_kv_caches()
    for view in prefill.views.values():
        view.fill_(-7.0)
    for _ in range(2):
        prefill.worker.restore_kv_caches()
    prefill.introduce(in_process=in_process)
    new = prefill.worker.get_handshake_metadata().endpoint
    assert (new.agent, new.start != old.start) == (old.agent, True)
    assert prefill.step().finished_sending == {"p"}, "its blocks are the engine's again"
    decode.decode(stale, [1, 2, 3, 13, 12])
    assert loaded(decode, prefill).failed_recving == {"d"}, "what was offered is withdrawn"
    assert asked(prefill, [1, 2, 3, 13, 12]).failed_recving == set()
    for there, here in zip([7, 8, 9, 10], [1, 2, 3, 13], strict=True):
        assert torch.equal(prefill.views["b"][here], kept[there])
    decode.decode(prefill.prefill(), [14, 15, 16, 17, 18], id="e")
    assert loaded(decode, prefill).failed_recving == set()
    assert torch.equal(decode.views["b"][14], prefill.views["b"][7])


def test_sleep_ends_a_pull_that_is_under_way(connector: ModuleType):
    prefill, decode = (Engine(connector) for _ in range(2))
    params = prefill.prefill()
    prefill.worker.shutdown()  # so it never ends by itself
    decode.decode(params, [1, 2, 3, 13, 12])
    assert not decode.step().finished_recving
    decode.worker.unregister_kv_caches()
    decode.worker.restore_kv_caches()
    results = decode.step()
    assert (results.finished_recving, results.failed_recving) == ({"d"}, {"d"})


# ── what the engine does to its caches and weights ────────────────────────────────────


def found(engine: Engine, id: str = "d") -> int:
    """How many tokens of the prompt could be loaded."""
    asking = request(id)
    engine.scheduler.on_new_request(asking)
    count, _ = engine.scheduler.get_num_new_matched_tokens(asking, 0)
    engine.scheduler.request_finished_all_groups(asking, ([],))
    return count


def test_after_a_reset_nothing_of_before_is_found_and_what_follows_is(connector: ModuleType):
    """vLLM resets before weights are changed in place: the same tokens then have another cache."""
    engine = Engine(connector, host_bytes=1 << 20)
    engine.compute(request("old"), [7, 8, 9, 10, 11])
    drained(engine)
    assert found(engine) == 16
    assert engine.scheduler.reset_cache() is True
    assert found(engine) == 0
    new = torch.rand_like(engine.views["b"])
    engine.views["b"][:] = new
    engine.compute(request("new"), [14, 15, 16, 17, 18])
    drained(engine)
    engine.views["b"].zero_()
    here = [1, 2, 3, 13, 12]
    assert asked(engine, here).failed_recving == set()
    assert torch.equal(engine.views["b"][here[:4]], new[[14, 15, 16, 17]])


def test_a_request_that_runs_through_a_reset_is_not_stored(connector: ModuleType):
    engine = Engine(connector, host_bytes=1 << 20, store_bytes_per_second=1)
    engine.compute(request("waits"), [7, 8, 9, 10, 11])
    running = request("runs", num_computed_tokens=0)
    engine.scheduler.on_new_request(running)
    assert engine.scheduler.reset_cache() is True
    waits = len(engine.pool.held)
    engine.step({"runs": len(PROMPT)}, [14, 15, 16, 17, 18])
    running.num_computed_tokens = len(PROMPT)
    engine.scheduler.request_finished_all_groups(running, ([14, 15, 16, 17, 18],))
    assert not {14, 15, 16, 17} & set(engine.pool.held)
    assert waits <= 1, "rows that waited for their turn are let go"


def test_after_a_reset_nobody_takes_over_from_the_engine_nor_it_from_others(connector: ModuleType):
    prefill, decode = (Engine(connector) for _ in range(2))
    prefill.scheduler.reset_cache()
    for one, other in ((prefill, decode), (decode, prefill)):
        asking = request("d", kv_transfer_params=one.prefill())
        other.scheduler.on_new_request(asking)
        assert other.scheduler.get_num_new_matched_tokens(asking, 0) == (0, False)
        assert other.scheduler._scheduler.counts["refused_requests"] == 1


def taken_over(one: Engine, other: Engine) -> bool:
    """Whether the other takes a request over."""
    asking = request("d", kv_transfer_params=one.prefill())
    other.scheduler.on_new_request(asking)
    count, _ = other.scheduler.get_num_new_matched_tokens(asking, 0)
    other.scheduler.request_finished_all_groups(asking, ([],))
    return count > 0


def test_engines_whose_weights_have_the_same_name_take_over_from_each_other(connector: ModuleType):
    prefill, decode = (Engine(connector) for _ in range(2))
    prefill.scheduler.reset_cache()
    prefill.set_weight_version("step 1")
    assert not taken_over(prefill, decode)
    decode.scheduler.reset_cache()
    assert not taken_over(prefill, decode)
    decode.set_weight_version("step 1")
    assert taken_over(prefill, decode)
    decode.set_weight_version("step 2")
    assert not taken_over(prefill, decode)


def test_a_ticket_that_names_no_identity_is_refused_once_weights_have_changed(
    connector: ModuleType,
):
    """It would be compared with what the engines were started with."""
    prefill, decode = (Engine(connector) for _ in range(2))
    params: Any = prefill.prefill()
    (ticket,) = params[OURS]["tickets"]
    params[OURS]["tickets"] = [str(replace(Ticket.parse(ticket), identity=b""))]
    decode.scheduler.on_new_request(asking := request("d", kv_transfer_params=params))
    assert decode.scheduler.get_num_new_matched_tokens(asking, 0) == (len(PROMPT) - 1, True)
    decode.set_weight_version("step 1")
    decode.scheduler.on_new_request(asking := request("e", kv_transfer_params=params))
    assert decode.scheduler.get_num_new_matched_tokens(asking, 0) == (0, False)


def test_rows_of_named_weights_are_stored_and_come_back(connector: ModuleType):
    engine = Engine(connector, host_bytes=1 << 20)
    engine.compute(request("old"), [7, 8, 9, 10, 11])
    drained(engine)
    engine.set_weight_version("step 1")
    assert engine.cache.num_resets == 1, "what vLLM caches itself is of the weights before"
    assert found(engine) == 0
    engine.compute(request("new"), [7, 8, 9, 10, 11])
    drained(engine)
    assert found(engine) == 16
    engine.set_weight_version("step 1")
    assert found(engine) == 0, "what was computed under that name may be of other weights"


def test_weights_are_not_named_while_a_block_is_in_use(connector: ModuleType):
    """It may hold something of the weights before."""
    prefill, decode = (Engine(connector) for _ in range(2))
    decode.set_weight_version("step 1")
    prefill.pool.touch(prefill.pool.blocks[3:4])
    prefill.set_weight_version("step 1")
    assert not taken_over(prefill, decode)
    prefill.pool.free_blocks(prefill.pool.blocks[3:4])
    prefill.set_weight_version("step 1")
    assert taken_over(prefill, decode)


def test_a_weight_version_reaches_a_connector_among_others(connector: ModuleType):
    from vllm.v1.engine.core import EngineCore  # pyright: ignore

    engine = Engine(connector)
    before = engine.scheduler._scheduler._engine.weights.identity
    core = EngineCore(SimpleNamespace(sub_connectors=[object(), engine.scheduler]))
    core.set_weight_version("step 1")
    assert core.weight_version == "step 1"
    assert dict(engine.scheduler._scheduler._engine.weights.identity.config) == {
        **dict(before.config),
        "run.weights": "'step 1'",
    }


def test_tickets_that_came_before_a_reset_are_given_back(connector: ModuleType):
    prefill, decode = (Engine(connector) for _ in range(2))
    asking = request("d", kv_transfer_params=prefill.prefill())
    decode.scheduler.on_new_request(asking)
    assert decode.scheduler.reset_cache() is True
    assert decode.scheduler.get_num_new_matched_tokens(asking, 0) == (0, False)


def test_a_reset_has_failed_while_something_is_loaded(connector: ModuleType):
    prefill, decode = (Engine(connector) for _ in range(2))
    decode.decode(prefill.prefill(), [1, 2, 3, 13, 12])
    assert decode.scheduler.reset_cache() is False
    loaded(decode)
    decode.scheduler.update_state_after_alloc(request("d"), blocks([1, 2, 3, 13, 12]), 0)
    assert decode.scheduler.reset_cache() is True


@pytest.fixture
def loading(connector: ModuleType) -> SimpleNamespace:
    """An engine that loads a prompt, and its core, whose eighth step computes."""
    from vllm.v1.engine.core import EngineCoreProc  # pyright: ignore

    prefill, decode = (Engine(connector, step_while_loading=True) for _ in range(2))
    decode.decode(prefill.prefill(), [1, 2, 3, 13, 12])
    steps: list[str] = []

    def take_step() -> tuple[dict[int, str] | None, bool]:
        steps.append("step")
        return ({0: f"output {len(steps)}"}, False) if len(steps) < 8 else (None, True)

    core = EngineCoreProc(decode.scheduler, take_step)
    return SimpleNamespace(core=core, steps=steps, scheduler=decode.scheduler, decode=decode)


@pytest.mark.parametrize("name", ["step", "step_with_batch_queue"])
def test_an_engine_that_only_loads_takes_its_next_step_at_once(loading: SimpleNamespace, name: str):
    """vLLM would pause after each: what they gave is heard all the same, and in order."""
    assert getattr(loading.core, name)() == (None, True)
    assert len(loading.steps) == 8
    told = [loading.core.output_queue.get_nowait() for _ in range(7)]
    assert told == [(0, f"output {k}") for k in range(1, 8)]


def test_an_engine_with_nothing_to_load_takes_one_step(loading: SimpleNamespace):
    loaded(loading.decode)
    loading.scheduler.update_state_after_alloc(request("d"), blocks([1, 2, 3, 13, 12]), 0)
    assert loading.core.step() == ({0: "output 1"}, False)


@pytest.mark.parametrize("why", ["asked", "ends", "steps with others", "paused"])
def test_an_engine_that_loads_has_an_ear_for_others(loading: SimpleNamespace, why: str):
    """Requests, its end, and engines that compute in step with it come first. While it is paused
    its scheduler has no requests."""
    if why == "asked":
        loading.core.input_queue.put("a request")
    loading.core.runs = why != "ends"
    loading.core.engines_running = why == "steps with others"
    loading.core.scheduler.has_requests = lambda: why != "paused"
    assert loading.core.step() == ({0: "output 1"}, False)
    assert len(loading.steps) == 1


def test_vllms_steps_are_its_own_unless_an_option_says_otherwise(connector: ModuleType):
    from vllm.v1.engine.core import EngineCore  # pyright: ignore

    before = EngineCore.step, EngineCore.step_with_batch_queue  # pyright: ignore
    connector.KvstowConnector(vllm_config(), Role.SCHEDULER, cache_config())
    assert (EngineCore.step, EngineCore.step_with_batch_queue) == before  # pyright: ignore


def test_an_engine_without_weight_versions_is_left_as_it_is(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    from vllm.v1.engine.core import EngineCore  # pyright: ignore

    monkeypatch.delattr(StandInCore, "set_weight_version")
    connector.KvstowConnector(vllm_config(), Role.SCHEDULER, cache_config())
    assert not hasattr(EngineCore, "set_weight_version")


def test_an_engine_in_its_users_process_is_stepped_by_the_user(
    connector: ModuleType, loading: SimpleNamespace
):
    from vllm.v1.engine.core import EngineCore  # pyright: ignore

    core = EngineCore(loading.scheduler, loading.core.take_step)
    assert core.step() == ({0: "output 1"}, False)


def test_a_producer_takes_nothing_over(connector: ModuleType):
    """vLLM gives a producer's blocks away while a step still writes to them."""
    prefill = Engine(connector)
    config = vllm_config()
    config.kv_transfer_config.is_kv_consumer = False
    producer = connector.KvstowConnector(config, Role.SCHEDULER, cache_config())
    asking = request("d", kv_transfer_params=prefill.prefill())
    producer.on_new_request(asking)
    assert producer.get_num_new_matched_tokens(asking, 0) == (0, False)
    assert producer._scheduler.counts["refused_requests"] == 1


@pytest.mark.parametrize(
    ("consumer", "zeroes", "policy", "waits"),
    [
        (False, False, "fcfs", True),
        (True, True, "priority", True),
        (True, True, "fcfs", False),
        (True, False, "priority", False),
    ],
)
def test_steps_that_may_still_write_to_blocks_are_waited_for(
    connector: ModuleType, consumer: bool, zeroes: bool, policy: str, waits: bool
):
    config, caches = vllm_config(host_bytes=1 << 20), cache_config()
    config.kv_transfer_config.is_kv_consumer = consumer
    config.scheduler_config.policy = policy
    caches.needs_kv_cache_zeroing = zeroes
    worker = connector.KvstowConnector(config, Role.WORKER, caches)
    worker.register_kv_caches(memory())
    side = worker._worker_side
    tiers = next(part for part in side.parts if hasattr(part, "host"))
    assert (side.pulls._after_steps, tiers._after_steps) == (waits, waits)
    worker.shutdown()


def test_nothing_is_pulled_while_steps_write_to_its_blocks(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    prefill, decode = (Engine(connector) for _ in range(2))
    steps = SimpleNamespace(over=False)

    def until_steps_are_over() -> Iterator[None]:
        while not steps.over:
            yield

    pulls = decode.worker._worker_side.pulls
    monkeypatch.setattr(pulls, "_until_steps_are_over", until_steps_are_over)
    decode.decode(prefill.prefill(), [1, 2, 3, 13, 12])
    before = decode.views["b"].clone()
    for _ in range(20):
        assert not decode.step().finished_recving
    assert torch.equal(decode.views["b"], before)
    steps.over = True
    assert loaded(decode).failed_recving == set()
    assert torch.equal(decode.views["b"][1], prefill.views["b"][7])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_loads_begin_when_the_device_computes_and_on_a_cpu_before(
    connector: ModuleType, device: str
):
    """A CPU computes within vLLM's call: what begins after it has waited for the whole step."""
    prefill, decode = (Engine(connector) for _ in range(2))
    side = decode.worker._worker_side
    assert not side._beside_steps
    side._beside_steps = device == "cuda"
    decode.decode(prefill.prefill(), [1, 2, 3, 13, 12])
    decode.worker.bind_connector_metadata(decode.scheduler.build_connector_meta(plan()))
    assert len(side.pulls) == (device == "cpu")
    decode.worker.start_load_kv(None)
    assert len(side.pulls) == 1


def test_a_step_whose_loads_the_engine_has_not_called_for_loads_with_the_next(
    connector: ModuleType,
):
    prefill, decode = (Engine(connector) for _ in range(2))
    decode.worker._worker_side._beside_steps = True
    start_load_kv, decode.worker.start_load_kv = decode.worker.start_load_kv, lambda _: None
    decode.decode(prefill.prefill(), [1, 2, 3, 13, 12])
    decode.step()
    assert len(decode.worker._worker_side.pulls) == 0
    assert loaded(decode).failed_recving == set()
    decode.worker.start_load_kv = start_load_kv


def test_blocks_are_held_for_ranks_that_another_connector_hides(connector: ModuleType):
    """vLLM's MultiConnector passes on what the first of its connectors says of the workers."""
    config = vllm_config(host_bytes=1 << 20)
    config.parallel_config.tensor_parallel_size = 2
    scheduler = connector.KvstowConnector(config, Role.SCHEDULER, cache_config())
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): object(), (0, 1): object()})
    pool = BlockPool()
    scheduler.bind_gpu_block_pool(pool)
    running = request("p", num_computed_tokens=0)
    scheduler.on_new_request(running)
    scheduler.get_num_new_matched_tokens(running, 0)
    order = scheduler.build_connector_meta(plan({"p": 18}, [7, 8, 9, 10, 11])).step.store
    assert order is not None
    for rank, held in ((0, [7, 8, 9, 10]), (1, [])):
        report = connector.KvstowReport(connector.StepResults(stored={order.job: 1}))
        scheduler.update_connector_output(told(report))
        assert pool.held == held, rank


def test_blocks_that_a_rank_may_still_be_written_to_have_a_reference_in_vllms_pool(
    connector: ModuleType,
):
    """While they do, vLLM takes steps, so that it hears when the last rank has let go."""
    scheduler = connector.KvstowConnector(vllm_config(), Role.SCHEDULER, cache_config())
    pool = BlockPool()
    scheduler.bind_gpu_block_pool(pool)

    def tell(*reports: Any) -> None:
        first, second = (connector.KvstowReport(each) for each in reports)
        both = pickle.loads(pickle.dumps(first.aggregate(second)))
        scheduler.update_connector_output(told(both))

    report = connector.StepResults
    tell(report(held={("r0", 1): (7, 8)}), report(held={("r1", 1): (7, 8)}))
    assert (pool.held, scheduler.has_pending_push_work()) == ([7, 8], True)
    assert not scheduler.has_pending_block_frees(), "vLLM would wait for them, and not preempt"
    tell(report(released=[("r0", 1)]), report())
    assert (pool.held, scheduler.has_pending_push_work()) == ([7, 8], True)
    tell(report(), report(released=[("r1", 1)]))
    assert (pool.held, scheduler.has_pending_push_work()) == ([], False)
    assert scheduler._scheduler_side.counts == {"held_blocks": 2, "released_blocks": 2}


def test_what_was_computed_with_blocks_that_others_failed_to_load_is_not_found(
    connector: ModuleType,
):
    """vLLM takes the step back that used them; its rows were on their way by then."""
    engine = Engine(connector, host_bytes=1 << 20)
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    engine.step(invalid=frozenset({8}))
    drained(engine)
    assert found(engine) == 0
    engine.compute(request("again"), [14, 15, 16, 17, 18])
    drained(engine)
    assert found(engine) == 16


def test_rows_are_stored_though_the_engine_does_not_tell_the_end_of_a_step(connector: ModuleType):
    """So vLLM does on all but the last pipeline rank, with speculative decoding."""
    engine = Engine(connector, host_bytes=1 << 20)
    wait_for_save, engine.worker.wait_for_save = engine.worker.wait_for_save, lambda: None
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    drained(engine)
    engine.worker.wait_for_save = wait_for_save
    assert found(engine) == 16


def test_an_engine_that_is_stepped_by_hand_holds_no_block_after_its_last_step(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    """vLLM resets its prefix cache only while no block is in use, and no step comes by itself."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = Engine(connector, host_bytes=1 << 20)
    asking = request("r")
    engine.compute(asking, [1, 2, 3, 4, 5])
    engine.scheduler.update_connector_output(told())
    assert engine.pool.held == []
    assert engine.cache.reset_prefix_cache()


def test_memory_that_is_registered_anew_takes_the_place_of_the_old(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    engine, closed = Engine(connector), list[object]()
    close = connector.WorkerSide.close
    monkeypatch.setattr(
        connector.WorkerSide, "close", lambda side: (closed.append(side), close(side))
    )
    first = engine.worker._worker_side
    engine.worker.register_kv_caches(memory())
    assert engine.worker._worker_side is not first
    assert closed == [first]


def test_nothing_is_stored_under_an_adapter_whose_files_have_changed(
    connector: ModuleType, tmp_path: Path
):
    """What vLLM has in memory may be of before or of after, and it does not tell."""
    weights = tmp_path / "adapter_model.bin"
    weights.write_bytes(b"one")
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path), lora_int_id=1)
    engine = Engine(connector, host_bytes=1 << 20)
    running = request("p", lora_request=lora, num_computed_tokens=0)
    engine.scheduler.on_new_request(running)
    engine.scheduler.get_num_new_matched_tokens(running, 0)
    engine.step({"p": 8}, [7, 8, 9, 10, 11])
    drained(engine)
    weights.write_bytes(b"two")
    running.num_computed_tokens = 8
    engine.step({"p": 10}, [7, 8, 9, 10, 11])
    running.num_computed_tokens = 18
    engine.scheduler.request_finished_all_groups(running, ([7, 8, 9, 10, 11],))
    assert engine.pool.held == []
    again = request("d", lora_request=lora)
    engine.scheduler.on_new_request(again)
    assert engine.scheduler.get_num_new_matched_tokens(again, 0) == (0, False)


def test_an_adapters_files_are_looked_at_once_in_a_step(
    connector: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "adapter_model.bin").write_bytes(b"one")
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path), lora_int_id=1)
    engine = Engine(connector, host_bytes=1 << 20)
    for id in ("p", "q"):
        asking = request(id, lora_request=lora, num_computed_tokens=0)
        engine.scheduler.on_new_request(asking)
    looked: list[object] = []
    name = engine.scheduler._adapters.name
    monkeypatch.setattr(
        engine.scheduler._adapters, "name", lambda each: (looked.append(each), name(each))[1]
    )
    engine.step({"p": 8, "q": 8}, [7, 8, 9, 10, 11])
    assert looked == [lora]
    engine.step({"p": 3}, [7, 8, 9, 10, 11])
    assert looked == [lora], "no block is full that was not before"


def test_tables_are_not_read_while_no_more_can_be_stored(connector: ModuleType):
    """What found no room is looked at again when there is some."""
    engine = Engine(connector, host_bytes=1 << 20)
    running = request("p", num_computed_tokens=0)
    engine.scheduler.on_new_request(running)
    engine.scheduler._scheduler_side.recall.stores._max_rows = 2
    read: list[str] = []

    def get_block_ids(id: str) -> tuple[list[int]]:
        read.append(id)
        return ([7, 8, 9, 10, 11],)

    for running.num_computed_tokens in (0, 8):
        output = SimpleNamespace(
            total_num_scheduled_tokens=8,
            num_scheduled_tokens={"p": 8},
            kv_connector_block_state=SimpleNamespace(get_block_ids=get_block_ids),
        )
        engine.scheduler.build_connector_meta(output)
    assert read == ["p"]


# ── events ────────────────────────────────────────────────────────────────────────────


def events_of(engine: Engine, count: int) -> list[CacheEvent]:
    found: list[CacheEvent] = []
    until = time.monotonic() + 20
    while len(found) < count and time.monotonic() < until:
        engine.step()
        found += engine.scheduler.take_events()
        time.sleep(0.01)
    return found


def test_rows_that_come_to_host_and_disk_are_told_by_vllms_hashes(
    connector: ModuleType, tmp_path: Path
):
    engine = Engine(
        connector,
        in_process=True,
        host_bytes=1 << 20,
        disk_path=str(tmp_path),
        disk_bytes=1 << 24,
        events=True,
    )
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    events = events_of(engine, 2)
    assert [event.medium for event in events if isinstance(event, BlockStored)] == [
        "CPU",
        "STORAGE",
    ]
    for event in events:
        assert isinstance(event, BlockStored)
        assert event.block_hashes == [0xFEED0000 + k for k in range(4)]
        assert event.parent_block_hash is None
        assert event.token_ids == PROMPT[:16]
        assert (event.block_size, event.group_idx) == (4, 0)


def test_a_restarted_engine_tells_of_what_a_request_finds_on_disk(
    connector: ModuleType, tmp_path: Path
):
    tiers = {"host_bytes": 1 << 20, "disk_path": str(tmp_path), "disk_bytes": 1 << 24}
    first = Engine(connector, events=True, **tiers)
    first.compute(request("p"), [7, 8, 9, 10, 11])
    events_of(first, 2)
    first.worker.shutdown()
    second = Engine(connector, events=True, **tiers)
    second.scheduler.on_new_request(request("d"))
    (event,) = events_of(second, 1)
    assert isinstance(event, BlockStored)
    assert (event.medium, event.token_ids) == ("STORAGE", PROMPT[:16])


def test_events_are_off_unless_asked_for(connector: ModuleType):
    engine = Engine(connector, host_bytes=1 << 20)
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    engine.step()
    assert list(engine.scheduler.take_events()) == []


def test_events_without_a_publisher_or_without_tiers_are_refused(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    def made(**options: object) -> object:
        return connector.KvstowConnector(
            vllm_config(events=True, **options), Role.SCHEDULER, cache_config()
        )

    with pytest.raises(SpecError, match="hint: --kv-events-config"):
        made(publishes=False, host_bytes=1 << 20)
    with pytest.raises(SpecError, match="hint: set host_bytes"):
        made()
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    with pytest.raises(SpecError, match="as bytes"):
        made(host_bytes=1 << 20)


@pytest.mark.parametrize(
    ("endpoint", "warns"),
    [("tcp://*:5557", False), ("tcp://[::]:5557", False), ("tcp://127.0.0.1:5557", True)],
)
def test_an_endpoint_that_vllm_connects_to_is_warned_of(
    endpoint: str, warns: bool, caplog: pytest.LogCaptureFixture
):
    check_published(SimpleNamespace(enable_kv_cache_events=True, endpoint=endpoint))
    assert ("hear nothing" in caplog.text) == warns


# ── why ───────────────────────────────────────────────────────────────────────────────


def why(place: Path, tokens: Sequence[int], *arguments: str) -> dict[str, Any]:
    """What the command line says of a prompt."""
    listed = json.dumps(list(tokens))
    result = CliRunner().invoke(app, ["why", str(place), "--tokens", listed, "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("journal", ["digests", "tokens"])
def test_kvstow_why_explains_prompts_that_the_engine_has_served(
    connector: ModuleType, tmp_path: Path, journal: str
):
    tiers = {"host_bytes": 1 << 20, "disk_path": str(tmp_path), "disk_bytes": 1 << 24}
    engine = Engine(connector, journal=journal, **tiers)
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    drained(engine)
    engine.end()
    assert why(tmp_path, PROMPT)["reason"] == "found"
    changed = [*PROMPT[:9], 7, *PROMPT[10:]]
    found = why(tmp_path, changed)
    assert (found["reason"], found["found_tokens"]) == ("differs", 8)
    places = {"digests": (8, 12, None, None), "tokens": (9, 10, PROMPT[9], 7)}
    told = (found[name] for name in ("token", "token_before", "stored_token", "asked_token"))
    assert tuple(told) == places[journal]
    other = {"digests": "never stored", "tokens": "differs"}
    assert why(tmp_path, range(18))["reason"] == other[journal]
    assert why(tmp_path, PROMPT, "--salt", "me")["reason"] == "salt"
    found = why(tmp_path, PROMPT, "--adapter", "poems")
    assert found["differences"] == [{"field": "adapter", "stored": "", "asked": "poems"}]
    (rank,) = tmp_path.glob("tp*")
    tier = DiskTier(rank)
    tier.evict(0, tier.keys(0))
    tier.close()
    assert why(tmp_path, PROMPT)["reason"] == "evicted"


def test_salt_and_adapter_of_an_engines_requests_are_told_apart(
    connector: ModuleType, tmp_path: Path
):
    tiers = {"host_bytes": 1 << 20, "disk_path": str(tmp_path), "disk_bytes": 1 << 24}
    engine = Engine(connector, **tiers)
    lora = SimpleNamespace(lora_name="poems", lora_path="/nowhere", lora_int_id=1)
    engine.compute(request("p", cache_salt="me", lora_request=lora), [7, 8, 9, 10, 11])
    drained(engine)
    engine.end()
    found = why(tmp_path, PROMPT)
    assert (found["reason"], {each["field"] for each in found["differences"]}) == (
        "adapter",
        {"adapter", "salt"},
    )
    asked = "--salt", "me", "--adapter", "poems /nowhere"
    assert why(tmp_path, PROMPT, *asked)["reason"] == "found"


def test_the_log_says_at_debug_level_why_a_request_found_no_more(
    connector: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG, "kvstow.adapters.vllm.scheduler.journal")
    monitored = logging.getLogger("kvstow")
    monitored.addHandler(caplog.handler)
    tiers = {"host_bytes": 1 << 20, "journal_path": str(tmp_path), "journal": "tokens"}
    engine = Engine(connector, **tiers)
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    drained(engine)
    changed = [*PROMPT[:9], 7, *PROMPT[10:]]
    asking = request("d", all_token_ids=changed)
    engine.scheduler.on_new_request(asking)
    assert engine.scheduler.get_num_new_matched_tokens(asking, 0) == (8, True)
    engine.scheduler.update_state_after_alloc(asking, blocks([1, 2]), 8)
    engine.end()
    monitored.removeHandler(caplog.handler)
    lines = [record.getMessage() for record in caplog.records if "tokens are found" in record.msg]
    assert lines[0].startswith("request p: 0 of 17 tokens are found: ")
    assert lines[1].startswith(
        "request d: 8 of 17 tokens are found: differs: token 9 is 7, and 509"
    )


def test_counts_come_to_vllms_metrics_by_engine_each_under_its_name(connector: ModuleType):
    registry = CollectorRegistry()
    engines = {0: ["m", "0"], 1: ["m", "1"]}
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = connector.KvstowMetrics(vllm_config(), kinds, ["model_name", "engine"], engines)
    assert registry.get_sample_value("kvstow_vllm_pulled_bytes_total", labels("1")) == 0.0
    metrics.observe({"pulls accepted": 2, "pull_seconds": [0.5, 0.25], "pulled_bytes": 100}, 0)
    metrics.observe({"pulls accepted": 1, "pulls fence": 1, "remote_missed_rows budget": 3}, 1)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.value
    }
    assert found == {
        ("kvstow_vllm_pulls_total", "m", "0", "accepted"): 2,
        ("kvstow_vllm_pulls_total", "m", "1", "accepted"): 1,
        ("kvstow_vllm_pulls_total", "m", "1", "fence"): 1,
        ("kvstow_vllm_pulled_bytes_total", "m", "0"): 100,
        ("kvstow_vllm_remote_missed_rows_total", "m", "1", "budget"): 3,
    }
    assert registry.get_sample_value("kvstow_vllm_pull_seconds_count", labels("0")) == 2
    assert registry.get_sample_value("kvstow_vllm_pull_seconds_sum", labels("0")) == 0.75
    assert registry.get_sample_value("kvstow_vllm_load_seconds_count", labels("0")) == 0


def test_what_the_connector_was_started_with_is_on_vllms_metrics(connector: ModuleType):
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    options = vllm_config(host_bytes=1 << 20, remote="redis://user:secret@there/0", digest="off")
    connector.KvstowMetrics(options, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    (info,) = [each for each in registry.collect() if each.name == "kvstow_vllm_config_info"]
    (sample,) = info.samples
    assert sample.value == 1
    assert sample.labels["digest"] == "off"
    assert sample.labels["host_bytes"] == str(1 << 20)
    assert sample.labels["remote"] == "redis", "no address and no secret"


def test_stats_of_two_ranks_add_up(connector: ModuleType):
    one, other = (
        connector.KvstowStats(data={"pulls accepted": 1, "pull_seconds": [seconds]})
        for seconds in (0.5, 0.25)
    )
    both = one.aggregate(other)
    assert both.data == {"pulls accepted": 2, "pull_seconds": [0.5, 0.25]}
    assert both.reduce() == {"pulls accepted": 2, "pull_seconds": 0.75}


def labels(engine: str) -> dict[str, str]:
    return {"model_name": "m", "engine": engine}
