"""A plugin for vLLM: its CPU latent attention with any number of tokens per block.

vLLM 0.32 compiles the decode kernel for 16 only, and sets `--block-size` to that. With
`KVSTOW_MLA_BLOCK` that many are taken, and a few lines of Torch stand in for the kernel. Latents
are written by vLLM's own `CPUMLAImpl`.
"""

import os
from typing import Any

import torch
from torch import Tensor


def free_mla_blocks() -> None:
    """Take the block size from the environment, if it names one. vLLM calls this at its start."""
    size = os.environ.get("KVSTOW_MLA_BLOCK")
    if size is None:
        return
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    from vllm import _custom_ops

    configured = CpuPlatform.check_and_update_config.__func__

    def with_size(cls: Any, vllm_config: Any) -> None:
        configured(cls, vllm_config)
        vllm_config.cache_config.block_size = int(size)

    CpuPlatform.check_and_update_config = classmethod(with_size)
    CPUMLABackend.supports_block_size = classmethod(lambda cls, block_size: True)
    CPUMLABackend.get_supported_kernel_block_sizes = staticmethod(lambda spec=None: [int(size)])
    _custom_ops.mla_decode_kvcache_cpu = decode


def decode(
    out: Tensor, query: Tensor, cache: Tensor, scale: float, tables: Tensor, lengths: Tensor
) -> None:
    """Attention of one token per request over the latents in its blocks."""
    size, width = cache.shape[-2:]
    latents = cache.view(-1, width)
    for r, length in enumerate(lengths.tolist()):
        position = torch.arange(length)
        keys = latents[tables[r, position // size].long() * size + position % size].float()
        weights = torch.softmax(query[r].float() @ keys.T * scale, -1)
        out[r] = (weights @ keys[:, : out.shape[-1]]).to(out.dtype)
