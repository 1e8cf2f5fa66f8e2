"""The connector: vLLM's questions and orders, handed to our two sides."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch

from kvstow.adapters.vllm.bases import (
    CacheHitSource,
    ConnectorBase,
    ConnectorMetadata,
    ConnectorRole,
    HandshakeMetadata,
    RequestStatus,
    SupportsHMA,
    TransferResults,
    WorkerMetadata,
)
from kvstow.adapters.vllm.cache.layout import adopted, declaration, declared_groups, required_layout
from kvstow.adapters.vllm.engine import (
    BlockPool,
    CacheConfig,
    EngineConfig,
    GivenBlocks,
    Request,
    StepPlan,
    TransferConfig,
    WorkersOutput,
    check_engine,
    check_sleep,
    steps_by_hand,
    stop_one_token_short,
)
from kvstow.adapters.vllm.identity import AdapterNames, EngineWeights
from kvstow.adapters.vllm.metrics import KvstowMetrics, KvstowStats
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.plugin import hear_weight_versions, step_while_loading
from kvstow.adapters.vllm.protocol import (
    EngineRequest,
    StepOrders,
    StepResults,
    WorkerEndpoint,
    request_of,
)
from kvstow.adapters.vllm.scheduler.events import TierEvents, check_published
from kvstow.adapters.vllm.scheduler.parts import BlockHolds, EngineState
from kvstow.adapters.vllm.scheduler.side import SchedulerSide
from kvstow.adapters.vllm.worker.side import WorkerSide
from kvstow.events.format import CacheEvent
from kvstow.plan.manifest import encode
from kvstow.plan.retention import Full
from kvstow.transfer.transport.nixl import NixlTransport

log = logging.getLogger(__name__)

SLEEP_NAMES = ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches")
OWN_NAMES = ("is_loading", "name_weights", "request_finished_all_groups", *SLEEP_NAMES)
"""Public names of the connector that its base class need not have."""


@dataclass
class KvstowEndpoint(HandshakeMetadata):
    """A worker's agent, for the scheduler, and what its tiers keep already."""

    endpoint: WorkerEndpoint
    kept: StepResults


@dataclass
class KvstowStep(ConnectorMetadata):
    """A step's work, for the workers."""

    step: StepOrders


@dataclass
class KvstowReport(WorkerMetadata):
    """What the workers tell the scheduler, besides requests that are over."""

    results: StepResults

    def aggregate(self, other: WorkerMetadata) -> "KvstowReport":
        assert isinstance(other, KvstowReport)
        self.results.join(other.results)
        return self


class KvstowConnector(ConnectorBase, SupportsHMA):
    """Hands requests over between vLLM instances, and keeps prefixes outside of them."""

    def __init__(
        self, vllm_config: EngineConfig, role: ConnectorRole, kv_cache_config: CacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        check_engine(KvstowConnector, ConnectorBase, OWN_NAMES)
        check_sleep(vllm_config, ConnectorBase, SLEEP_NAMES)
        self._options = ConnectorOptions.of(
            vllm_config.kv_transfer_config.kv_connector_extra_config,
            num_engines=vllm_config.parallel_config.data_parallel_size,
        )
        self._declared = declaration(vllm_config, kv_cache_config, self._options)
        self._groups_taken = kv_cache_config.transfer_group_ids
        pages = [page for group in self._declared.groups for page in group]
        self._forgets = any(not isinstance(page.retention, Full) for page in pages)
        self._engine = vllm_config.kv_transfer_config.engine_id
        self._results = StepResults()
        self._requests: dict[str, Request] = {}
        """Requests of the engine that may be stored while they run."""
        self._adapters = AdapterNames(vouched=bool(self._options.unverified))
        self._takes_over = vllm_config.kv_transfer_config.is_kv_consumer
        """Whether vLLM keeps a block until every step that may still write to it has ended."""
        zeroes = kv_cache_config.needs_kv_cache_zeroing
        preempts = vllm_config.scheduler_config.policy == "priority"
        self._after_steps = not self._takes_over or (zeroes and preempts)
        """Whether such steps are waited for. With priorities vLLM takes a block back in the very
        pass in which it has decided to zero it."""
        self._events: TierEvents | None = None
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role is ConnectorRole.SCHEDULER:
            hear_weight_versions(KvstowConnector)
            if self._options.step_while_loading:
                step_while_loading(KvstowConnector)
            groups = declared_groups(self._declared)
            if self._options.events:
                check_published(vllm_config.kv_events_config)
                size = kv_cache_config.hash_block_size or gcd(*(x.block_tokens for x in groups))
                self._events = TierEvents(groups, self._groups_taken, size)
            engine = EngineState(
                groups=groups,
                num_blocks=self._declared.num_blocks,
                options=self._options,
                weights=EngineWeights(self._declared.identity),
                num_ranks=self._declared.tp[1] * self._declared.pp[1],
                takes_over=self._takes_over,
                ahead=vllm_config.num_prefill_lookahead_tokens,
                pulls_early=self._may_fill_free_blocks(kv_cache_config),
            )
            self._scheduler = SchedulerSide(engine, self._events)

    def _may_fill_free_blocks(self, kv_cache_config: CacheConfig) -> bool:
        """Whether nothing writes to blocks that vLLM counts as free, and its hashes are those of
        whole blocks of its only group."""
        sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
        is_one = len(kv_cache_config.kv_cache_groups) == 1
        own = sizes | {kv_cache_config.hash_block_size or min(sizes)}
        return is_one and len(own) == 1 and not self._after_steps

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        """Rows, where the attention backend reads them; vLLM falls back to its own otherwise."""
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        return required_layout(vllm_config, ConnectorOptions.of(options))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvstowStats:
        return KvstowStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: EngineConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvstowMetrics:
        return KvstowMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> KvstowStats | None:
        """What was counted since the last call."""
        side = self._scheduler or self._worker
        data = side.take_counts() if side is not None else {}
        return KvstowStats(data=data) if data else None

    # ── in the workers ────────────────────────────────────────────────────────────────────

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "vLLM has not registered its memory yet"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = "-".join(str(r) for r in (self._declared.pp[0], self._declared.tp[0]))
        results = StepResults()
        if self._worker is not None:  # other memory than before
            self._worker.sleep()
            results = self._worker.results()
            self._worker.close()
        arena = adopted(self._declared, kv_caches)
        if self._options.manifest_file:
            Path(f"{self._options.manifest_file}.{rank}").write_bytes(encode(arena.layout))
        self._worker = WorkerSide(
            arena,
            self._options,
            transport=NixlTransport(listen=self._options.listen),
            name=f"{self._engine}-{rank}",
            after_steps=self._after_steps,
            by_hand=steps_by_hand(),
            results=results,
        )

    def get_handshake_metadata(self) -> KvstowEndpoint:
        return KvstowEndpoint(self._worker_side.endpoint, self._worker_side.kept())

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: TransferConfig) -> bool:
        """Whether the cache's memory may go away and come back (vLLM 0.33)."""
        return True

    def unregister_kv_caches(self) -> None:
        """Before vLLM sleeps: nothing of ours touches the cache any more."""
        if self._worker is not None:
            self._worker.sleep()

    def restore_kv_caches(self) -> None:
        """After it has woken up. It asks for `get_handshake_metadata` once more."""
        if self._worker is not None:
            self._worker.wake()

    def bind_connector_metadata(self, connector_metadata: ConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker_side.begin(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts loads. vLLM calls this when it has given the device the step's computation; on a
        CPU they have begun before."""
        self._worker_side.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole rows are read when the step has computed all layers."""

    def wait_for_save(self) -> None:
        """Submits stores, and waits for none: their blocks are held."""
        self._worker_side.save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        self._results = results = self._worker_side.results(idle=self._step.idle)
        return TransferResults(
            finished_sending=results.sent,
            finished_recving=results.received,
            failed_recving=results.failed,
        )

    def build_connector_worker_meta(self) -> KvstowReport | None:
        return KvstowReport(self._results) if self._results else None

    @property
    def _step(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvstowStep)
        return metadata.step

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close()

    # ── in the scheduler ──────────────────────────────────────────────────────────────────

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], HandshakeMetadata]
    ) -> None:
        each = (metadata[rank] for rank in sorted(metadata))
        workers = [worker for worker in each if isinstance(worker, KvstowEndpoint)]
        self._scheduler_side.meet([worker.endpoint for worker in workers])
        for worker in workers:
            self._scheduler_side.apply(worker.kept)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._groups_taken

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler_side.bind(BlockHolds(gpu_block_pool))

    def on_new_request(self, request: Request) -> None:
        plain = self._plain(request)  # its tokens are the request's own, and change with them
        if self._forgets and plain.asks_for_tickets:
            stop_one_token_short(request)
        self._scheduler_side.arrived(plain, request)
        self._requests[request.request_id] = request

    def _plain(self, request: Request) -> EngineRequest:
        return request_of(request, self._adapters)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Loads are beside the steps, never before one: an engine that plans ahead cannot undo
        a step that has computed with a load that failed."""
        count = self._scheduler_side.matched(request.request_id, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: Request, blocks: GivenBlocks, num_external_tokens: int
    ) -> None:
        ids = self._taken(blocks.get_block_ids()) if num_external_tokens else ()
        self._scheduler_side.allocated(request.request_id, ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Where the tokens come from that the request has just been given blocks for."""
        hits = self._scheduler_side.hits(request.request_id, num_external_tokens)
        return {CacheHitSource(source): count for source, count in hits.items() if count}

    def build_connector_meta(self, scheduler_output: StepPlan) -> KvstowStep:
        self._store(scheduler_output)
        computes = scheduler_output.total_num_scheduled_tokens > 0
        return KvstowStep(self._scheduler_side.take_step(computes=computes))

    def _store(self, scheduler_output: StepPlan) -> None:
        """Blocks that the step fills are queued to be stored. vLLM advances `num_computed_tokens`
        after this call."""
        recall, tables = self._scheduler_side.recall, scheduler_output.kv_connector_block_state
        if recall is None:
            return
        assert tables is not None, "vLLM plans steps with a connector, and tells it no blocks"
        name = self._adapters.looked_up_once()
        for id, new in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(id)
            filled = request.num_computed_tokens + new if request is not None else 0
            if request is None or not recall.is_due(id, filled):
                continue
            if request.lora_request is None or name(request.lora_request) is not None:
                recall.computed(id, filled, self._taken(tables.get_block_ids(id) or ()))
            else:
                recall.forget(id)

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for what is being loaded."""
        return self._scheduler_side.is_loading

    def has_pending_push_work(self) -> bool:
        """Whether held blocks wait for another step, though no request does."""
        return self._scheduler_side.waits_for_step

    def has_pending_block_frees(self) -> bool:
        """Asked when a running request finds no block: True, and it waits a step instead of
        preempting another. Blocks that wait to be stored are let go."""
        recall = self._scheduler_side.recall
        return recall is not None and recall.make_room()

    def reset_cache(self) -> bool:
        """vLLM's call when it forgets all caches, such as before its weights are changed in place:
        `pause`, `sleep`, `reset_prefix_cache(reset_connector=True)`."""
        return self._scheduler_side.reset()

    def name_weights(self, name: str) -> None:
        """vLLM was told a weight version. What it caches itself is of the weights before, and has
        to go: while some block is in use the name is not taken."""
        self._scheduler_side.reset()
        assert self._kv_cache_manager is not None, "vLLM has not bound its cache yet"
        if self._kv_cache_manager.reset_prefix_cache():
            self._scheduler_side.name_weights(name)
            return
        log.warning(
            "weights %r: blocks of the previous weights are in use, so nothing is shared with "
            "other engines\n\nhint: pause the engine, change its weights, then name them",
            name,
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return self._scheduler_side.finished(
            self._plain(request), self._taken(block_ids), _num_filled(request)
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def update_connector_output(self, connector_output: WorkersOutput) -> None:
        if connector_output.invalid_block_ids:  # a connector beside ours has loaded them
            self._scheduler_side.forget_stored()
        worker_meta = connector_output.kv_connector_worker_meta
        results = worker_meta.results if isinstance(worker_meta, KvstowReport) else StepResults()
        self._scheduler_side.apply(results, tuple(connector_output.finished_sending or ()))
        recall = self._scheduler_side.recall
        if recall is not None and not self._requests and steps_by_hand():
            recall.give_up()

    def take_events(self) -> Sequence[CacheEvent]:
        """Events of the tiers; vLLM publishes them with its own, in the same bytes."""
        return self._events.take() if self._events is not None else ()

    def _taken(self, block_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(block_ids[group]) for group in self._groups_taken)


def _num_filled(request: Request) -> int:
    """Tokens whose cache is certainly in the request's blocks; none if it was aborted.

    vLLM counts tokens as computed when it schedules them.
    """
    if request.status not in (
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
    ):
        return 0
    computed = request.num_computed_tokens - request.num_in_flight_tokens
    return max(0, min(computed, request.num_tokens - 1))


def _log_with_vllm() -> None:
    """What kvstow logs goes where vLLM's own lines go."""
    vllm_log, kvstow_log = logging.getLogger("vllm"), logging.getLogger("kvstow")
    if not kvstow_log.handlers:
        kvstow_log.handlers, kvstow_log.propagate = list(vllm_log.handlers), False
        kvstow_log.setLevel(vllm_log.getEffectiveLevel())
