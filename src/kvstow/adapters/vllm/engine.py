"""What vLLM must offer: every attribute of its objects that the adapter uses, as types.

    0.32   a step's loads, blocks and results go through the connector as typed here
    0.33   also tells a connector that the cache's memory goes and comes back (sleep mode), and may
           call `update_state_after_alloc` of an asynchronous load steps after it was matched

`check_engine` compares these types with the classes of the vLLM that runs, at its start. Nothing
else in the adapter touches an object of vLLM's by a name that does not stand here, but for cache
specs and configurations, whose optional fields are read with a default.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import get_annotations
from typing import Any, Protocol

from kvstow.errors import SpecError

log = logging.getLogger(__name__)

READ_VERSIONS = ("0.32", "0.33")
"""Versions whose source was read and that the tests run with."""


# ── configuration ─────────────────────────────────────────────────────────────────────────


class TransferConfig(Protocol):
    kv_connector_extra_config: dict[str, Any]
    engine_id: str

    @property
    def is_kv_consumer(self) -> bool: ...


class ParallelConfig(Protocol):
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    data_parallel_size: int
    rank: int


class ModelConfig(Protocol):
    """Of a model's configuration much more is read, with defaults: see `identity`, and
    `enable_sleep_mode`."""

    model: str
    dtype: Any

    @property
    def use_mla(self) -> bool: ...

    def get_total_num_kv_heads(self) -> int: ...


class SchedulerConfig(Protocol):
    policy: str


class DeviceConfig(Protocol):
    device_type: str


class CacheSettings(Protocol):
    cache_dtype: str


class CompilationConfig(Protocol):
    static_forward_context: Mapping[str, object]


class LoadConfig(Protocol):
    load_format: object


class EngineConfig(Protocol):
    """vLLM's `VllmConfig`."""

    kv_transfer_config: TransferConfig
    parallel_config: ParallelConfig
    model_config: ModelConfig
    scheduler_config: SchedulerConfig
    device_config: DeviceConfig
    cache_config: CacheSettings
    compilation_config: CompilationConfig
    load_config: LoadConfig
    kv_events_config: Any

    @property
    def num_prefill_lookahead_tokens(self) -> int: ...


class CacheGroup(Protocol):
    """Layers with one block table; `kv_cache_spec` is one of `cache.pages.KINDS`."""

    layer_names: Sequence[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool
    host_resident: bool


class CacheTensor(Protocol):
    layers: Sequence[str]
    size: int
    layer_stride: int
    block_stride: int
    offset: int


class CacheConfig(Protocol):
    """vLLM's `KVCacheConfig`: what the cache is made of."""

    num_blocks: int
    kv_cache_groups: Sequence[CacheGroup]
    kv_cache_tensors: Sequence[CacheTensor]
    kv_cache_layout: str | None
    hash_block_size: int | None

    @property
    def transfer_group_ids(self) -> tuple[int, ...]: ...

    @property
    def needs_kv_cache_zeroing(self) -> bool: ...


# ── requests ──────────────────────────────────────────────────────────────────────────────


class LoraAdapter(Protocol):
    lora_name: str
    lora_path: str
    lora_int_id: int


class Request(Protocol):
    """A request in the scheduler. vLLM counts tokens as computed when it schedules them."""

    request_id: str
    status: object
    prompt_token_ids: list[int] | None
    all_token_ids: Sequence[int]
    _all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None
    kv_hints: object
    lora_request: LoraAdapter | None
    cache_salt: str | None
    mm_features: Sequence[Any] | None
    prompt_embeds: object
    resumable: bool
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool

    @property
    def num_tokens(self) -> int: ...


class GivenBlocks(Protocol):
    def get_block_ids(self) -> tuple[Sequence[int], ...]: ...


# ── the scheduler ─────────────────────────────────────────────────────────────────────────


class Block(Protocol):
    block_id: int
    ref_cnt: int


class BlockPool(Protocol):
    blocks: Sequence[Block]

    def get_num_free_blocks(self) -> int: ...

    def get_new_blocks(self, num_blocks: int) -> Sequence[Block]: ...

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: list[int]
    ) -> Sequence[Block] | None: ...

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None: ...

    def touch(self, blocks: Sequence[Block]) -> None: ...

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None: ...


class CacheManager(Protocol):
    block_pool: BlockPool

    def reset_prefix_cache(self) -> bool: ...


class BlockTables(Protocol):
    def get_block_ids(self, req_id: str) -> tuple[Sequence[int], ...] | None: ...


class StepPlan(Protocol):
    """vLLM's `SchedulerOutput`: what the next step computes."""

    total_num_scheduled_tokens: int
    num_scheduled_tokens: Mapping[str, int]
    kv_connector_block_state: BlockTables | None


class WorkersOutput(Protocol):
    """vLLM's `KVConnectorOutput`: what all workers have told of a step."""

    finished_sending: set[str] | None
    invalid_block_ids: set[int]
    kv_connector_worker_meta: object


REQUIRED: tuple[tuple[str, str, type], ...] = (
    ("vllm.config", "VllmConfig", EngineConfig),
    ("vllm.config", "KVTransferConfig", TransferConfig),
    ("vllm.config", "ParallelConfig", ParallelConfig),
    ("vllm.config", "ModelConfig", ModelConfig),
    ("vllm.config", "SchedulerConfig", SchedulerConfig),
    ("vllm.config", "DeviceConfig", DeviceConfig),
    ("vllm.config", "CacheConfig", CacheSettings),
    ("vllm.config", "CompilationConfig", CompilationConfig),
    ("vllm.config", "LoadConfig", LoadConfig),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig", CacheConfig),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", CacheGroup),
    ("vllm.v1.kv_cache_interface", "KVCacheTensor", CacheTensor),
    ("vllm.lora.request", "LoRARequest", LoraAdapter),
    ("vllm.v1.request", "Request", Request),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", GivenBlocks),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", CacheManager),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock", Block),
    ("vllm.v1.core.block_pool", "BlockPool", BlockPool),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState", BlockTables),
    ("vllm.v1.core.sched.output", "SchedulerOutput", StepPlan),
    ("vllm.v1.outputs", "KVConnectorOutput", WorkersOutput),
)
"""Where vLLM has what, and the type that says which of its names are used."""


# ── the check ─────────────────────────────────────────────────────────────────────────────


def check_engine(connector: type, base: type, own: Sequence[str]) -> None:
    """SpecError where the vLLM that runs lacks something; one warning where it is newer than what
    was read. `connector` overrides methods of `base`, but for those that are its `own`."""
    version = str(getattr(import_module("vllm"), "__version__", "?"))
    missing = [
        f"{where}.{name}" + (f".{attribute}" if attribute else "")
        for where, name, used in REQUIRED
        for attribute in _missing(where, name, used)
    ]
    inherited = dir(base)
    public = [name for name in vars(connector) if not name.startswith("_")]
    missing += [
        f"{base.__name__}.{name}" for name in public if name not in inherited and name not in own
    ]
    if missing:
        raise SpecError(
            f"vLLM {version} does not have {', '.join(missing)}, which this kvstow uses\n\n"
            f"hint: it was written for vLLM {' and '.join(READ_VERSIONS)}"
        )
    _warn_if_newer(version)


def check_sleep(vllm_config: EngineConfig, base: type, hooks: Sequence[str]) -> None:
    """SpecError where the cache's memory may go away, and this vLLM does not tell connectors."""
    sleeps = getattr(vllm_config.model_config, "enable_sleep_mode", False)
    if sleeps and not all(hasattr(base, name) for name in hooks):
        raise SpecError(
            "sleep mode takes the cache's memory away, and this vLLM does not tell its connector: "
            "peers would keep using it\n\n"
            "hint: vLLM 0.33, or without --enable-sleep-mode"
        )


def _missing(where: str, name: str, used: type) -> list[str]:
    """Names that a class does not have; an empty one where the class itself is missing."""
    try:
        cls = getattr(import_module(where), name, None)
    except ImportError:
        cls = None
    return [""] if cls is None else sorted(names_of(used) - _offered(cls))


def names_of(protocol: type) -> set[str]:
    """The attributes and methods that a protocol names."""
    declared = set(get_annotations(protocol))
    return declared | {name for name in vars(protocol) if not name.startswith("_")}


def _offered(cls: type) -> set[str]:
    """What instances of a class have: what it declares, and what its constructor sets."""
    names = set(dir(cls))
    for each in cls.__mro__:
        names |= set(get_annotations(each))
        code = getattr(vars(each).get("__init__"), "__code__", None)
        names |= set(code.co_names) if code is not None else set()
    return names


def _warn_if_newer(version: str) -> None:
    number = re.match(r"(\d+)\.(\d+)", version)
    newest = tuple(int(part) for part in READ_VERSIONS[-1].split("."))
    if number is not None and tuple(int(part) for part in number.groups()) > newest:
        log.warning(
            "vLLM %s is newer than %s, the last version that was read for this kvstow: compare "
            "texts with and without the connector; what may have changed is listed in "
            "kvstow.adapters.vllm.engine and, for kernels, in kvstow.adapters.vllm.cache.pages",
            version,
            READ_VERSIONS[-1],
        )


def steps_by_hand() -> bool:
    """Whether the engine steps in its user's process, and only while the user waits for an answer
    (`LLM.generate`): nothing is told to it after its last step."""
    return os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"


# ── the one place where a request is changed ──────────────────────────────────────────────

STOPS_SHORT = "kvstow_stops_short"


def stop_one_token_short(request: Request) -> None:
    """Leave the prompt's last token to decode, which computes it anyway for what comes after it.

    A state that has seen it cannot see it again, and vLLM lets go of what only it sees of a window
    or chunk before the blocks are handed over. Its own connectors do so for states.
    """
    params, tokens = request.kv_transfer_params, request.prompt_token_ids
    if tokens is None or len(tokens) < 2 or params is None or params.get(STOPS_SHORT):
        return  # embeddings; nothing to leave; a request that was preempted and comes again
    if not len(tokens) == len(request.all_token_ids) == request.num_prompt_tokens:
        raise SpecError(
            f"request {request.request_id}: {len(tokens)} prompt tokens, "
            f"{len(request.all_token_ids)} in all, {request.num_prompt_tokens} counted: its last "
            "token cannot be left to decode"
        )
    request.prompt_token_ids = tokens[:-1]  # the list may be the caller's
    del request._all_token_ids[-1:]  # pyright: ignore[reportPrivateUsage]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    params[STOPS_SHORT] = True


Step = Callable[[Any], tuple[dict[int, Any] | None, bool]]
"""A step of vLLM's engine core: outputs for clients, and whether it has computed."""
