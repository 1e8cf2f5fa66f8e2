"""A plugin for vLLM that tests put on the path: packed rows for its attention on CPUs.

vLLM's CPU kernels follow the strides they are given, yet it declares layer-compact memory only.
With KVSTOW_SHARED_ROWS=1 its cache lies in shared memory, so that engines of a machine map each
other's, as they do on a GPU.
"""

import os
from typing import Any


def widen_cpu_layouts() -> None:
    """Let vLLM's CPU attention run on rows. vLLM calls this at its start."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    def layouts(cls: type) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(layouts)
    if os.environ.get("KVSTOW_SHARED_ROWS") == "1":
        share_cpu_caches()


def share_cpu_caches() -> None:
    """Have vLLM allocate its cache in a file in memory, and arenas over it know that file."""
    import torch
    from vllm.v1.worker import utils

    from kvstow.memory.allocate import host_bytes
    from kvstow.memory.arena import Arena

    files: dict[int, int] = {}
    zeros, adopt = torch.zeros, Arena.adopt.__func__

    def shared_zeros(*shape: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is not torch.int8 or len(shape) != 1:
            return zeros(*shape, **options)
        made = host_bytes(shape[0], align=4096, huge_pages=False, pinned=False)
        assert made.file is not None
        files[made.memory.data_ptr()] = made.file
        return made.memory.view(torch.int8)

    class SharedTorch:
        """torch, with one function of its own."""

        zeros = staticmethod(shared_zeros)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def adopt_shared(cls: type[Arena], *given: Any, **options: Any) -> Arena:
        arena = adopt(cls, *given, **options)
        arena.file = files.get(arena.address)
        return arena

    utils.torch = SharedTorch()
    Arena.adopt = classmethod(adopt_shared)
