"""Stand-ins of vLLM's classes, and an engine of our two connectors under them.

Only what the connector inherits or receives is stood in for; vLLM itself is in tests/vllm.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from prometheus_client import Counter, Gauge, Histogram

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


def found(engine: Engine, id: str = "d") -> int:
    """How many tokens of the prompt could be loaded."""
    asking = request(id)
    engine.scheduler.on_new_request(asking)
    count, _ = engine.scheduler.get_num_new_matched_tokens(asking, 0)
    engine.scheduler.request_finished_all_groups(asking, ([],))
    return count


def taken_over(one: Engine, other: Engine) -> bool:
    """Whether the other takes a request over."""
    asking = request("d", kv_transfer_params=one.prefill())
    other.scheduler.on_new_request(asking)
    count, _ = other.scheduler.get_num_new_matched_tokens(asking, 0)
    other.scheduler.request_finished_all_groups(asking, ([],))
    return count > 0
