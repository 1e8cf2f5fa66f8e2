# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportMissingParameterType=false, reportIncompatibleMethodOverride=false
"""What vLLM declares of its cache, in plain values; and its memory, adopted."""

import os
from collections.abc import Mapping
from typing import Any

import torch
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
    declared_layout,
    declared_order,
)
from kvstow.errors import MemoryLayoutError
from kvstow.memory.arena import Arena
from kvstow.plan.layout import Order
from kvstow.plan.retention import Chunk, Full, Retention, Window
from kvstow.plan.spec import DType, Extent


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
    heads = vllm_config.model_config.get_total_num_kv_heads()
    return Declaration(
        model=model or os.path.basename(os.path.normpath(vllm_config.model_config.model)),
        order=kv_cache_config.kv_cache_layout,
        num_blocks=kv_cache_config.num_blocks,
        groups=tuple(
            tuple(_page(name, _spec_of(group, name), tp, heads) for name in group.layer_names)
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


def _page(layer: str, spec: Any, tp: tuple[int, int], total_heads: int) -> Page:
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
        heads=_heads(layer, spec, tp, total_heads),
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


def _heads(layer: str, spec: Any, tp: tuple[int, int], total: int) -> Extent:
    """Which of the model's `total` heads this rank holds: a part of its own, or one that
    neighbouring ranks hold alike."""
    rank, size = tp
    mine = spec.num_heads
    if size == 1 or isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return Extent.whole("head", mine)
    parts = total // mine
    if spec.num_head_slots is not None or parts * mine != total or size % parts:
        raise MemoryLayoutError(
            f"layer {layer!r}: {mine} heads on each of {size} ranks, {total} in the model: which "
            "are where is not certain"
        )
    first = rank // (size // parts) * mine
    return Extent("head", total, ((first, first + mine),))


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
