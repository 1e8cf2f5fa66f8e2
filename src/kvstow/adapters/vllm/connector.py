# pyright: reportIncompatibleMethodOverride=false, reportMissingImports=false
# pyright: reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUntypedBaseClass=false
"""The connector: vLLM's questions and orders, handed to our two sides."""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.request import RequestStatus

from kvstow.adapters.vllm.cache.layout import adopted, declaration, declared_groups, wanted_layout
from kvstow.adapters.vllm.loras import KnownAdapters
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.plugin import hear_weight_versions, step_on_while_loading
from kvstow.adapters.vllm.protocol import (
    EngineRequest,
    KeyLevels,
    RanksReport,
    StepOrders,
    WorkerEndpoint,
    request_of,
)
from kvstow.adapters.vllm.scheduler.events import TierEvents, check_published
from kvstow.adapters.vllm.scheduler.recall import Recall
from kvstow.adapters.vllm.scheduler.side import SchedulerSide
from kvstow.adapters.vllm.scheduler.stores import PoolHolds
from kvstow.adapters.vllm.worker.offers import OfferSender
from kvstow.adapters.vllm.worker.side import WorkerSide
from kvstow.events.format import CacheEvent
from kvstow.observe import VLLM_COUNTERS, vllm_counter
from kvstow.plan.manifest import encode
from kvstow.plan.retention import Full
from kvstow.transfer.transport.nixl import NixlTransport

log = logging.getLogger(__name__)


@dataclass
class KvstowEndpoint(KVConnectorHandshakeMetadata):
    """A worker's agent, for the scheduler. `worker` is lost on the way to another process."""

    endpoint: WorkerEndpoint
    worker: WorkerSide | None = None
    kept: KeyLevels = field(default_factory=dict[int, tuple[tuple[bytes, ...], bytes]])

    def __reduce__(self) -> tuple[Any, ...]:
        return KvstowEndpoint, (self.endpoint, None, self.kept)


@dataclass
class KvstowStep(KVConnectorMetadata):
    """A step's work, for the workers."""

    step: StepOrders


@dataclass
class KvstowReport(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler, besides requests that are over."""

    report: RanksReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KvstowReport":
        assert isinstance(other, KvstowReport)
        return KvstowReport(self.report.joined(other.report))


class KvstowStats(KVConnectorStats):
    """Counts by name, since the last time."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> "KvstowStats":
        return KvstowStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvstowMetrics(KVConnectorPromMetrics):
    """The same counts on vLLM's /metrics, each under its name: `kvstow_vllm_…_total`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {
            each.name: self._counter_cls(
                name=each.family,
                documentation=each.text,
                labelnames=[*labelnames, *each.labels],
            )
            for each in VLLM_COUNTERS
        }
        for each in (each for each in VLLM_COUNTERS if not each.label):
            for values in per_engine_labelvalues.values():
                self._counters[each.name].labels(*values)  # 0 from the beginning

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for what, count in transfer_stats_data.items():
            counter, value = vllm_counter(what)
            labels = [*self.per_engine_labelvalues[engine_idx], *([value] if value else [])]
            self._counters[counter.name].labels(*labels).inc(count)


class KvstowConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands requests over between vLLM instances, and keeps prefixes outside of them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        self._options = ConnectorOptions.of(
            vllm_config.kv_transfer_config.kv_connector_extra_config
        )
        self._declared = declaration(vllm_config, kv_cache_config, self._options)
        self._groups_taken = kv_cache_config.transfer_group_ids
        pages = [page for group in self._declared.groups for page in group]
        self._forgets = any(not isinstance(page.retention, Full) for page in pages)
        self._engine = vllm_config.kv_transfer_config.engine_id
        self._stats: defaultdict[str, float] = defaultdict(float)
        self._report = RanksReport()
        self._requests: dict[str, Any] = {}
        """Requests of the engine that may be stored while they run."""
        self._adapters = KnownAdapters(vouched=bool(self._options.unverified))
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
        if role is KVConnectorRole.SCHEDULER:
            hear_weight_versions(KvstowConnector)
            step_on_while_loading(KvstowConnector)
            groups = declared_groups(self._declared)
            if self._options.events:
                check_published(vllm_config.kv_events_config)
                size = kv_cache_config.hash_block_size or gcd(*(x.block_tokens for x in groups))
                self._events = TierEvents(groups, self._groups_taken, size)
            self._scheduler = SchedulerSide(
                groups,
                self._declared.num_blocks,
                self._options,
                identity=self._declared.identity,
                num_ranks=self._declared.tp[1] * self._declared.pp[1],
                takes_over=self._takes_over,
                events=self._events,
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Rows, where the attention backend reads them; vLLM falls back to its own otherwise."""
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        return wanted_layout(vllm_config, ConnectorOptions.of(given))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvstowStats:
        return KvstowStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvstowMetrics:
        return KvstowMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> KvstowStats | None:
        """What was counted since the last call."""
        counts = self._stats if self._scheduler is None else self._scheduler.counts
        found = dict(counts)
        counts.clear()
        return KvstowStats(data=found) if found else None

    # ── in the workers ────────────────────────────────────────────────────────────────────

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "vLLM has not registered its memory yet"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = "-".join(str(r) for r in (self._declared.pp[0], self._declared.tp[0]))
        if self._worker is not None:  # other memory than before
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
        )

    def get_handshake_metadata(self) -> KvstowEndpoint:
        return KvstowEndpoint(self._worker_side.endpoint, self._worker, self._worker_side.kept())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
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

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._worker_side.results(idle=self._step.idle)
        for what, count in results.counts.items():
            self._stats[what] += count
        self._report = results.report
        return KVConnectorTransferResults(
            finished_sending=set(results.sent),
            finished_recving=set(results.received),
            failed_recving=set(results.failed),
        )

    def build_connector_worker_meta(self) -> KvstowReport | None:
        return KvstowReport(self._report) if self._report else None

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
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        known = [metadata[rank] for rank in sorted(metadata)]
        workers = [each for each in known if isinstance(each, KvstowEndpoint)]
        endpoints = [each.endpoint for each in workers]
        local = workers[0].worker if len(workers) == 1 else None
        tell = local.adopt if local else OfferSender(endpoints).tell
        self._scheduler_side.meet(endpoints, adopt=tell)
        kept = {each.endpoint.agent: each.kept for each in workers}
        self._scheduler_side.apply(RanksReport(kept=kept))

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._groups_taken

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        holds = PoolHolds(gpu_block_pool)
        self._scheduler_side.held.pool = holds
        if self._scheduler_side.recall is not None:
            self._scheduler_side.recall.stores.holds = holds

    def on_new_request(self, request: Any) -> None:
        plain = self._plain(request)  # its tokens are the request's own, and change with them
        if self._forgets and plain.asks_for_tickets:
            _stop_one_token_short(request)
        self._scheduler_side.arrived(plain)
        if self._scheduler_side.recall is not None:
            self._requests[request.request_id] = request

    def _plain(self, request: Any) -> EngineRequest:
        return request_of(request, self._adapters)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Loads are beside the steps, never before one: an engine that plans ahead cannot undo
        a step that has computed with a load that failed."""
        count = self._scheduler_side.matched(request.request_id, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = self._taken(blocks.get_block_ids()) if num_external_tokens else ()
        self._scheduler_side.allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvstowStep:
        if self._scheduler_side.recall is not None:
            self._store(self._scheduler_side.recall, scheduler_output)
        computes = scheduler_output.total_num_scheduled_tokens > 0
        return KvstowStep(self._scheduler_side.take_step(computes=computes))

    def _store(self, recall: Recall, scheduler_output: Any) -> None:
        """Blocks that the step fills are queued to be stored.

        vLLM advances `num_computed_tokens` after this call. What finds no room now is looked at
        again when there is some.
        """
        if self._options.remote:
            recall.scheduled(scheduler_output.num_scheduled_tokens)
        if recall.stores.is_full:
            return
        tables = scheduler_output.kv_connector_block_state
        is_known = self._adapters.looked_at_once()
        due, requests = recall.due, self._requests
        for id, new in scheduler_output.num_scheduled_tokens.items():
            if id not in due or (filled := requests[id].num_computed_tokens + new) < due[id]:
                continue
            if is_known(requests[id].lora_request):
                recall.computed(id, filled, self._taken(tables.get_block_ids(id)))
            else:
                recall.forget(id)

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for what is being loaded."""
        return self._scheduler_side.is_loading

    def has_pending_push_work(self) -> bool:
        """Whether held blocks wait for another step, though no request does."""
        recall, held = self._scheduler_side.recall, self._scheduler_side.held
        return len(held) > 0 or (recall is not None and len(recall.stores) > 0)

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
            "weights %r: blocks of the weights before are in use, so nothing is shared with other "
            "engines\n\nhint: pause the engine, change its weights, then name them",
            name,
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return self._scheduler_side.finished(
            self._plain(request), self._taken(block_ids), _num_filled(request)
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:  # a connector beside ours has loaded them
            self._scheduler_side.forget_stored()
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, KvstowReport):
            self._scheduler_side.apply(told.report)
            if self._events is not None:
                self._events.changed(told.report.changes)
        for request in connector_output.finished_sending or ():
            self._scheduler_side.sent(request)

    def take_events(self) -> Sequence[CacheEvent]:
        """Events of the tiers; vLLM publishes them with its own, in the same bytes."""
        return self._events.take() if self._events is not None else ()

    def _taken(self, block_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(block_ids[group]) for group in self._groups_taken)


def _stop_one_token_short(request: Any) -> None:
    """Leave the prompt's last token to decode, which computes it anyway for what comes after it.

    A state that has seen it cannot see it again, and vLLM lets go of what only it sees of a window
    or chunk before the blocks are handed over. Its own connectors do so for states.
    """
    params, tokens = request.kv_transfer_params, request.prompt_token_ids
    if tokens is None or len(tokens) < 2 or params.get("kvstow_stops_short"):
        return  # embeddings; nothing to leave; a request that was preempted and comes again
    request.prompt_token_ids = tokens[:-1]  # the list may be the caller's
    del request._all_token_ids[-1:]  # pyright: ignore[reportPrivateUsage]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    params["kvstow_stops_short"] = True


def _num_filled(request: Any) -> int:
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
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvstow")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.getEffectiveLevel())
