"""SGLang's own host pools, factory and controller on CPU, for tests of scripts/test-sglang.

SGLang imports torchvision for images that nobody here has. The package index has it for CUDA only,
and there two of its operators are missing, which its import wants to know: they are declared below,
without code. Nothing of SGLang itself is replaced.
"""

import argparse
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheFile,
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.server_args import ServerArgs

__all__ = [
    "CacheRequestHandle",
    "HiCacheFile",
    "LoRARef",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
]

RANK = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
    "attn_tp_rank": 0,
    "attn_dcp_size": 1,
    "attn_dcp_rank": 0,
}


RANK_PROGRAM = str(Path(__file__).with_name("sglang_rank.py"))


@contextmanager
def engine(*, tp: tuple[int, int] = (0, 1), **settings: Any) -> Iterator[None]:
    """What SGLang's modules read of a server's arguments, as in a rank of a server with these."""
    sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), tp[1])
    rank = RANK | {"tp_rank": tp[0], "attn_tp_rank": tp[0]} | sizes
    with (
        get_context().override_server_args(device="cpu", **settings),
        host_memory_budget_scope(1 << 30),
        get_parallel().override(**rank),
    ):
        yield


def meet(scratch: Path, rank: int, size: int) -> None:
    """Make this process one of a group."""
    where = (scratch / "group").as_uri()
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=size)


def mha(
    layout: str, *, page: int = 4, layers: int = 3, heads: int = 2, dim: int = 8, v_dim: int = 8
) -> tuple[Any, Any]:
    """A device pool of keys and values per head, and its host pool."""
    device = MHATokenToKVPool(
        size=16 * page,
        page_size=page,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    host = get_mha_host_pool_cls(info)(
        info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=16 * page,
        start_layer=0,
        end_layer=layers,
    )
    return device, host


def mla(layout: str, *, page: int = 4, layers: int = 3) -> tuple[Any, Any]:
    """A device pool of latents, and its host pool."""
    device = MLATokenToKVPool(
        size=16 * page,
        page_size=page,
        dtype=torch.bfloat16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    host = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=16 * page,
        start_layer=0,
        end_layer=layers,
        target_layer_num=layers,
    )
    return device, host


def mamba(*, layers: int = 2, slots: int = 16) -> Any:
    """A host pool of recurrent states: one page is one state with its convolution."""
    temporal = torch.zeros(layers, slots, 4, 8, dtype=torch.float32)
    conv = torch.zeros(layers, slots, 6, 3, dtype=torch.bfloat16)
    info = MambaStateBufferInfo(temporal=temporal, conv=(conv,))
    return MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")


def parsed_arguments(arguments: list[str]) -> argparse.Namespace:
    """What SGLang's server makes of a command line."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(arguments)


def extra_config(**options: Any) -> dict[str, Any]:
    """What an operator writes into --hicache-storage-backend-extra-config."""
    return {
        "backend_name": "kvstow",
        "module_path": "kvstow.adapters.sglang",
        "class_name": "KvstowHiCache",
        "interface_v1": 1,
        **options,
    }


def storage_config(options: dict[str, Any], **rank: Any) -> HiCacheStorageConfig:
    """What a rank tells its storage backend of itself."""
    known: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "tiny",
        "extra_config": options,
    }
    return HiCacheStorageConfig(**(known | rank))


def backend(host: Any, options: dict[str, Any], **rank: Any) -> Any:
    """Our backend, as SGLang's factory makes it and its controller registers a pool."""
    made = StorageBackendFactory.create_backend("dynamic", storage_config(options, **rank), host)
    made.register_mem_pool_host(host)
    made.on_host_pools_registered()
    return made


def controller(device: Any, host: Any, options: dict[str, Any], scratch: Path) -> Any:
    """SGLang's controller of host memory, with our backend attached."""
    return _attached(HiCacheController, device, host, options, scratch)


def hybrid_controller(
    device: Any, host: Any, states: Any, options: dict[str, Any], scratch: Path
) -> Any:
    """SGLang's controller of several host pools: attention, and recurrent states beside it."""
    attention = PoolEntry(PoolName.KV, host, device, lambda layer: layer, True)
    recurrent = PoolEntry(PoolName.MAMBA, states, None, lambda layer: layer)
    group = HostPoolGroup([attention, recurrent])
    return _attached(HybridCacheController, device, group, options, scratch)


def _attached(kind: Any, device: Any, host: Any, options: dict[str, Any], scratch: Path) -> Any:
    if not torch.distributed.is_initialized():
        meet(scratch, 0, 1)
    allocator = PagedTokenToKVPoolAllocator(
        device.size, device.page_size, torch.bfloat16, "cpu", device, need_sort=False
    )
    return kind(
        allocator,
        host,
        device.page_size,
        torch.distributed.group.WORLD,
        threading.Event(),
        io_backend="direct",
        storage_backend="dynamic",
        prefetch_threshold=device.page_size,
        model_name="tiny",
        storage_backend_extra_config=dict(options),
    )
