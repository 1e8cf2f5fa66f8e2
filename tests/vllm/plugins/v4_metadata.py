"""A plugin for vLLM: what its CPU build lacks to prepare a step of DeepSeek-V4.

vLLM 0.32 expects Triton for CPUs, which no package registry has, and asks its CPU builder for two
more plans than it makes. The kernels of the step itself are vLLM's.
"""

import os
from typing import Any

import torch
from torch import Tensor


def prepare_v4() -> None:
    """Fill the gaps, if the environment asks for it. vLLM calls this at its start."""
    if "KVSTOW_V4" not in os.environ:
        return
    from vllm.triton_utils.dispatcher import register_kernels

    mla = "vllm.v1.attention.backends.mla"
    register_kernels(
        {
            "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": requests_of_tokens,
            f"{mla}.compressor_utils.CompressedSlotMappingKernel.kernel": compressed_slots,
            f"{mla}.indexer.BuildPrefillChunkMetadataKernel.kernel": index_bounds,
            f"{mla}.sparse_swa.ComputePrefillMetadataKernel.kernel": unread,
            f"{mla}.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": unread,
        }
    )
    name_all_layer_types()


def name_all_layer_types() -> None:
    """vLLM 0.32 reads five plans of its CPU builder, which names three. All are None there."""
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
    from vllm.v1.attention.backends.mla import sparse_swa

    names = [getattr(sparse_swa, x) for x in dir(sparse_swa) if x.startswith("_LAYER_TYPE_")]

    def plans(self: Any, num_decode_tokens: int) -> dict[str, None]:
        return dict.fromkeys(names)

    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = plans


def unread(*_: Any, **__: Any) -> None:
    """Indices that GPU kernels read; vLLM's CPU attention makes its own from positions."""


def requests_of_tokens(
    starts: Tensor, out: Tensor, num_reqs: int, num_mapped: int, num_tokens: int, **_: int
) -> None:
    """Which request each token is of; 0 for those behind the last."""
    tokens = torch.arange(num_tokens, dtype=starts.dtype)
    found = torch.searchsorted(starts[1 : num_reqs + 1].contiguous(), tokens, right=True)
    found = found.clamp(max=num_reqs - 1)
    out[:num_tokens] = torch.where(tokens < num_mapped, found, 0).to(out.dtype)


def compressed_slots(
    out: Tensor,
    slots: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    stride: int,
    block_size: int,
    dcp_world: int,
    interleave: int,
    ratio: int,
    pad: int,
    width: int,
) -> None:
    """Where the last of every `ratio` tokens writes what they are compressed to."""
    assert dcp_world == 1
    for r in range(len(table)):
        low, high = int(starts[r]), int(starts[r + 1])
        position = int(seq_lens[r]) - (high - low) + torch.arange(high - low)
        state = position // ratio
        new = table[r, (state // block_size).clamp(max=table.shape[1] - 1)].long() * block_size
        writes = ((position + 1) % ratio == 0) & (slots[low:high] != pad)
        out[low:high] = torch.where(writes, new + state % block_size, pad)


def index_bounds(
    starts: Tensor,
    seq_lens: Tensor,
    ends: Tensor,
    row_starts: Tensor,
    seq_of_state: Tensor,
    first: Tensor,
    end: Tensor,
    slice_start: int,
    slice_stop: int,
    dcp_rank: int,
    dcp_world: int,
    interleave: int,
    block_size: int,
    ratio: int,
) -> None:
    """Which compressed states each token of a prefill sees."""
    assert dcp_world == 1
    for r in range(len(seq_lens)):
        low, high = int(starts[r]), int(starts[r + 1])
        tokens = torch.arange(low, high)
        seen = (int(seq_lens[r]) - high + 1 + tokens) // ratio
        kept = (tokens >= slice_start) & (tokens < slice_stop)
        at = tokens[kept] - slice_start
        first[at] = row_starts[r]
        end[at] = (row_starts[r] + seen[kept]).to(end.dtype)
        seq_of_state[int(ends[r]) : int(ends[r + 1])] = r
