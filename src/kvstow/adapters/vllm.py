# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportMissingParameterType=false, reportIncompatibleMethodOverride=false
"""A KV connector for vLLM: the only module that imports it.

    --kv-transfer-config '{"kv_connector": "KvstowConnector",
        "kv_connector_module_path": "kvstow.adapters.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {}}'

vLLM makes one connector in its scheduler and one in every worker. Here its objects become plain
values and ours become its own; everything else is in `kvstow.adapters.connector`.
"""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstow.adapters.connector.declared import (
    Declaration,
    Page,
    Region,
    axes_of,
    declared_groups,
    declared_layout,
    declared_order,
)
from kvstow.adapters.connector.messages import Card, Found, Results, Step
from kvstow.adapters.connector.scheduler import Asked, SchedulerSide
from kvstow.adapters.connector.settings import Settings
from kvstow.adapters.connector.worker import WorkerSide
from kvstow.errors import MemoryLayoutError
from kvstow.memory.arena import Arena
from kvstow.plan.layout import Order
from kvstow.plan.manifest import encode
from kvstow.plan.spec import Chunk, DType, Extent, Full, Retention, Window
from kvstow.transfer.nixl import NixlTransport

CPU_ROWS = "KVSTOW_VLLM_CPU_ROWS"


# ── what vLLM declares ────────────────────────────────────────────────────────────────────


def declaration(vllm_config: Any, kv_cache_config: Any, *, model: str) -> Declaration:
    """One rank's cache in plain values; MemoryLayoutError for what cannot be taken over."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise MemoryLayoutError("context parallelism spreads a block's tokens over ranks")
    ranks = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    tp = (parallel.rank % ranks[0], ranks[0])
    groups = [group for group in kv_cache_config.kv_cache_groups if group.enable_kv_transfer]
    if any(group.host_resident for group in groups):
        raise MemoryLayoutError("some cache groups live in host memory")
    return Declaration(
        model=model or os.path.basename(os.path.normpath(vllm_config.model_config.model)),
        order=kv_cache_config.kv_cache_layout,
        num_blocks=kv_cache_config.num_blocks,
        groups=tuple(
            tuple(_page(name, _spec_of(group, name), tp) for name in group.layer_names)
            for group in groups
        ),
        regions=tuple(
            Region(
                layers=tuple(tensor.layers),
                nbytes=tensor.size,
                layer_stride=tensor.layer_stride,
                block_stride=tensor.block_stride,
                offset=tensor.offset,
            )
            for tensor in kv_cache_config.kv_cache_tensors
        ),
        tp=tp,
        pp=(parallel.rank // ranks[0] % ranks[1], ranks[1]),
    )


def _spec_of(group: Any, layer: str) -> Any:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _page(layer: str, spec: Any, tp: tuple[int, int]) -> Page:
    if not isinstance(spec, AttentionSpec) or not isinstance(spec.tokens_per_state, int):
        raise MemoryLayoutError(f"layer {layer!r}: caches of kind {type(spec).__name__} are not "
                                "taken over yet")  # fmt: skip
    dtype = DType(str(spec.dtype).removeprefix("torch."))
    content, rest = divmod(spec.state_content_size_bytes, dtype.unit)
    if rest:
        dtype, content = DType.UINT8, spec.state_content_size_bytes
    return Page(
        layer=layer,
        retention=_retention(layer, spec),
        block_tokens=spec.block_size,
        heads=_heads(layer, spec, tp),
        states=spec.num_states,
        content=content,
        dtype=dtype,
    )


def _retention(layer: str, spec: Any) -> Retention:
    """By exact kind: a kind that is not known here may keep its tokens in another way."""
    kind = type(spec)
    if kind in (FullAttentionSpec, MLAAttentionSpec):
        return Full()
    if kind in (SlidingWindowSpec, SlidingWindowMLASpec):
        return Window(spec.sliding_window)
    if kind is ChunkedLocalAttentionSpec:
        return Chunk(spec.attention_chunk_size)
    raise MemoryLayoutError(f"layer {layer!r}: caches of kind {kind.__name__} are not taken over")


def _heads(layer: str, spec: Any, tp: tuple[int, int]) -> Extent:
    """Which of the whole model's heads this rank holds."""
    rank, size = tp
    if size == 1 or isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return Extent.whole("head", spec.num_heads)
    if spec.max_tp_shards is None or spec.num_head_slots is not None:
        raise MemoryLayoutError(f"layer {layer!r}: how its heads are split over {size} ranks is "
                                "not declared")  # fmt: skip
    shards = min(size, spec.max_tp_shards)
    if size % shards:
        raise MemoryLayoutError(f"layer {layer!r}: {shards} shards on {size} ranks")
    first = rank // (size // shards) * spec.num_heads
    return Extent("head", shards * spec.num_heads, ((first, first + spec.num_heads),))


def adopted(declared: Declaration, tensors: Mapping[str, torch.Tensor]) -> Arena:
    """An arena over vLLM's memory, once addresses and strides are what was declared."""
    order = declared_order(declared.order)
    names = [page.layer for pages in declared.groups for page in pages]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise MemoryLayoutError(f"vLLM registered no memory for layers {missing[:8]}")
    for name in names:
        if tensors[name].shape[0] != declared.num_blocks:
            raise MemoryLayoutError(
                f"layer {name!r}: its kernels see {tensors[name].shape[0]} blocks, the scheduler "
                f"{declared.num_blocks}\n\nhint: set --block-size to what the kernels use"
            )
    base = tensors[names[0]].untyped_storage().data_ptr()
    layout = declared_layout(declared, base_align=base & -base)
    views: dict[Any, torch.Tensor] = {name: _opaque(name, tensors[name], order) for name in names}
    return Arena.adopt(layout, views, axes=axes_of(order))


def _opaque(layer: str, tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """`[block, head, token, content]` with the inside of a page as one axis; never a copy."""
    try:
        if len(axes_of(order)) == 3:
            return tensor.view(*tensor.shape[:2], -1)
        return tensor.transpose(1, 2).view(tensor.shape[0], -1)
    except RuntimeError as error:
        raise MemoryLayoutError(
            f"layer {layer!r}: in {order} the inside of a page is one run, yet strides are "
            f"{tensor.stride()} for {tuple(tensor.shape)}"
        ) from error


# ── what goes over vLLM's own wires ───────────────────────────────────────────────────────


@dataclass
class KvstowCard(KVConnectorHandshakeMetadata):
    """A worker's agent, for the scheduler."""

    card: Card


@dataclass
class KvstowStep(KVConnectorMetadata):
    """A step's work, for the workers."""

    step: Step


@dataclass
class KvstowFound(KVConnectorWorkerMetadata):
    """Workers' answers to lookups, for the scheduler: what all ranks have."""

    found: dict[str, Found]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KvstowFound":
        assert isinstance(other, KvstowFound)
        return KvstowFound(
            {name: found.both(other.found[name]) for name, found in self.found.items()}
        )


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
    """The same counts on vLLM's /metrics: `kvstow_total{what=…}`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counter: Any = self._counter_cls(
            name="kvstow",
            documentation="What the kvstow connector did: pulls by outcome, leases by end, bytes",
            labelnames=[*labelnames, "what"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for what, count in transfer_stats_data.items():
            self._counter.labels(*self.per_engine_labelvalues[engine_idx], what).inc(count)


# ── the connector ─────────────────────────────────────────────────────────────────────────


class KvstowConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands requests over between vLLM instances, and keeps prefixes outside of them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _speak()
        self._settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._declared = declaration(vllm_config, kv_cache_config, model=self._settings.model)
        self._groups_taken = kv_cache_config.transfer_group_ids
        self._engine = vllm_config.kv_transfer_config.engine_id
        self._stats: defaultdict[str, float] = defaultdict(float)
        self._found: dict[str, Found] = {}
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                declared_groups(self._declared),
                self._declared.num_blocks,
                self._settings,
                model=self._declared.model,
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Rows, where the attention backend reads them; vLLM falls back to its own otherwise."""
        return Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config).layout or None

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
    def _hands(self) -> WorkerSide:
        assert self._worker is not None, "vLLM has not registered its memory yet"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = "-".join(str(r) for r in (self._declared.pp[0], self._declared.tp[0]))
        arena = adopted(self._declared, kv_caches)
        if self._settings.manifest_file:
            Path(f"{self._settings.manifest_file}.{rank}").write_bytes(encode(arena.layout))
        self._worker = WorkerSide(
            arena,
            self._settings,
            transport=NixlTransport(),
            name=f"{self._engine}-{rank}",
        )

    def get_handshake_metadata(self) -> KvstowCard:
        return KvstowCard(self._hands.card)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._hands.promise(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._hands.begin(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: rows are read after the request has finished."""

    def wait_for_save(self) -> None:
        """Nothing: whoever reads rows keeps them from being reused."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found: Results = self._hands.results(idle=self._step.idle)
        for what, count in found.counts.items():
            self._stats[what] += count
        self._found = {answer.request: answer for answer in found.found}
        return KVConnectorTransferResults(
            finished_sending=set(found.sent),
            finished_recving=set(found.received),
            failed_recving=set(found.failed),
        )

    def build_connector_worker_meta(self) -> KvstowFound | None:
        return KvstowFound(self._found) if self._found else None

    @property
    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvstowStep)
        return metadata.step

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    # ── in the scheduler ──────────────────────────────────────────────────────────────────

    @property
    def _desk(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        cards = [metadata[rank] for rank in sorted(metadata)]
        self._desk.meet([found.card for found in cards if isinstance(found, KvstowCard)])

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._groups_taken

    def on_new_request(self, request: Any) -> None:
        self._desk.arrived(_asked(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count = self._desk.matched(request.request_id, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = self._taken(blocks.get_block_ids())
        self._desk.allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvstowStep:
        idle = scheduler_output.total_num_scheduled_tokens == 0
        return KvstowStep(self._desk.take_step(idle=idle))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return self._desk.finished(_asked(request), self._taken(block_ids), num_tokens)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def update_connector_output(self, connector_output: Any) -> None:
        answers = connector_output.kv_connector_worker_meta
        if isinstance(answers, KvstowFound):
            self._desk.found(tuple(answers.found.values()))
        for request in connector_output.finished_sending or ():
            self._desk.sent(request)

    def _taken(self, block_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(block_ids[group]) for group in self._groups_taken)


def _speak() -> None:
    """What kvstow logs goes where vLLM's own lines go."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvstow")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.getEffectiveLevel())


def _asked(request: Any) -> Asked:
    """The request, and in its salt all that its cache depends on besides tokens and model."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    inputs = [(found.identifier, found.mm_position.offset) for found in request.mm_features or ()]
    return Asked(
        id=request.request_id,
        tokens=request.all_token_ids,
        salt=repr((request.cache_salt, adapter, inputs)).encode(),
        params=request.kv_transfer_params,
    )


# ── an optional plugin ────────────────────────────────────────────────────────────────────


def widen_cpu_layouts() -> None:
    """Let vLLM's CPU attention run on rows, if the environment asks for it.

    vLLM calls this at start (entry point `vllm.general_plugins`). Its CPU kernels follow the
    strides they are given, yet it declares layer-compact memory only.
    """
    if os.environ.get(CPU_ROWS) != "1":
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    def layouts(cls: type) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(layouts)
