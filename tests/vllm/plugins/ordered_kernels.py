"""Attention over pages of `[block, head, token, content]`, a token's key before its value."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl


class OrderedAttentionImpl(CPUAttentionBackendImpl):
    """Writes and reads the cache by slots, by the strides of vLLM's own view."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        size = kv_cache.shape[2]
        slots = slot_mapping.long()
        some = slots >= 0
        slots, count = slots[some], len(some)
        content = torch.cat([key[:count][some], value[:count][some]], -1)
        kv_cache[slots // size, :, slots % size] = content.to(kv_cache.dtype)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            return output
        starts = attn_metadata.query_start_loc.tolist()
        for r, length in enumerate(attn_metadata.seq_lens.tolist()):
            first, end = starts[r], starts[r + 1]
            table = attn_metadata.block_table[r]
            output[first:end] = self._one(query[first:end], kv_cache, table, length).to(
                output.dtype
            )
        return output

    def _one(self, query: Tensor, cache: Tensor, table: Tensor, length: int) -> Tensor:
        """The attention of the last tokens of one request over all that they see."""
        asks = torch.arange(length - len(query), length)
        window = self.sliding_window if self.sliding_window > 0 else length
        sees = torch.arange(max(0, length - len(query) - window + 1), length)
        size = cache.shape[2]
        cells = cache[table[sees // size].long(), :, sees % size].float()
        keys, values = cells.repeat_interleave(self.num_queries_per_kv, 1).split(self.head_size, -1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * self.scale
        if self.logits_soft_cap:
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        behind = asks[:, None] - sees
        scores.masked_fill_((behind < 0) | (behind >= window), float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.float()[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1)[..., : len(sees)]
        return torch.einsum("hqk,khd->qhd", weights, values)
