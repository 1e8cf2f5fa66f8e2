"""What an engine says of its cache → a layout. From its words, never from shapes.

    page of layer i of a region, block b   starts at   offset + i · layer_stride + b · block_stride

All regions lie in one allocation and may overlay each other: a block id belongs to one group
at a time. Where it is certain that kernels keep tokens one after the other, or in known sections
(`pages`), a state is a token, and engines with different tokens per block are joined. Otherwise
what lies inside a page is the kernels' business (vLLM's own for CPUs keep keys transposed over the
whole block): all tokens of a block are one state, and blocks move whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch

from kvstow.adapters.vllm.cache.pages import STATE_KIND, DeclaredPage, declared_page, kernels_of
from kvstow.adapters.vllm.engine import CacheConfig, CacheGroup, EngineConfig
from kvstow.adapters.vllm.identity import identity_of
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.errors import MemoryLayoutError
from kvstow.memory.arena import Arena
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity
from kvstow.plan.layout import ORDERS, Layout, Order, Page, PlacedGroup, Placement
from kvstow.plan.pack import page_in_one_piece
from kvstow.plan.retention import short_name
from kvstow.plan.spec import Extent, Field, LayerSpec

MAX_BASE_ALIGN = 64
"""No more is asked of the allocation than any allocator gives, so that a layout stays the same
from start to start."""

CANNOT_VIEW_ROWS = {("cpu", "mla"): "0.32.0"}
"""Device and attention whose backend grants any layout, and then cannot view rows, with the
version where it was seen: vLLM's CPU MLA calls `view` on its cache. There vLLM's own layout is
taken."""

MIXED_KIND = "UniformTypeKVCacheSpecs"
"""A group of several specs, by layer."""

STATE_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
"""What models call the number of groups that share a Mamba-2 layer's B and C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredRegion:
    """Same-shaped layers at equal distances in the allocation of `nbytes` bytes."""

    layers: tuple[str, ...]
    nbytes: int
    layer_stride: int
    block_stride: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDeclaration:
    """Everything the engine says of one rank's cache. `groups` share one set of block ids."""

    identity: Identity
    order: Order
    num_blocks: int
    groups: tuple[tuple[DeclaredPage, ...], ...]
    regions: tuple[DeclaredRegion, ...]
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)


def declared_order(name: str | None) -> Order:
    """The order of that name; MemoryLayoutError for one that is not known."""
    for order in ORDERS:
        if order == name:
            return order
    raise MemoryLayoutError(f"the engine calls its layout {name!r}, not one of {', '.join(ORDERS)}")


def declared_groups(declaration: CacheDeclaration) -> tuple[Group, ...]:
    """The engine's groups, in its order."""
    return tuple(
        Group(
            name=f"{short_name(pages[0].retention)}.{g}",
            layers=tuple(_spec(page, declaration.order) for page in pages),
        )
        for g, pages in enumerate(declaration.groups)
    )


def axes_of(order: Order) -> tuple[str, ...]:
    """Names of a layer tensor's axes once the inside of a page is one run."""
    return ("block", "head", "content") if _heads_outside(order) else ("block", "content")


def declared_layout(declaration: CacheDeclaration, *, base_align: int) -> Layout:
    """The layout, with offsets from the start of the allocation.

    `base_align` is what the allocation's address is a multiple of. Refuses declarations that
    contradict themselves; `Arena.adopt` then compares with the memory itself.
    """
    groups = declared_groups(declaration)
    places = _places(declaration, declaration.order)
    named = [layer.name for group in groups for layer in group.layers]
    if sorted(named) != sorted(places):
        raise MemoryLayoutError(
            f"layers of groups that have no place: {sorted(set(named) - set(places))[:8]}; "
            f"places of layers that no group has: {sorted(set(places) - set(named))[:8]}"
        )
    sizes = {region.nbytes for region in declaration.regions}
    if len(sizes) != 1:
        raise MemoryLayoutError(f"regions of allocations of {sorted(sizes)} bytes, not of one")
    rows = tuple(
        PlacedGroup(
            group=group,
            rows_per_slab=1,
            placements=tuple(places[layer.name] for layer in group.layers),
        )
        for group in groups
    )
    return Layout(
        model=declaration.identity.model,
        identity=declaration.identity,
        order=declaration.order,
        groups=rows,
        num_slabs=declaration.num_blocks,
        nbytes=sizes.pop(),
        base_align=gcd(base_align, MAX_BASE_ALIGN),
        tp=declaration.tp,
        pp=declaration.pp,
    )


def _heads_outside(order: Order) -> bool:
    return order.index("H") < order.index("N")


def _spec(page: DeclaredPage, order: Order) -> LayerSpec:
    """A layer whose block is one state: per head where heads lie apart, else all together.
    Where it is known how tokens lie, a state is what it is to the kernels."""
    states, heads, fields = page.states, page.heads, page.fields
    if page.in_token_order:
        fields = (Field("kv", page.dtype, (Extent.whole("content", page.content),)),)
    elif not fields:
        states, heads, fields = 1, *_unknown_inside(page, order)
    return LayerSpec(
        name=page.layer,
        retention=page.retention,
        block_tokens=page.block_tokens,
        states=states,
        heads=heads,
        fields=fields,
    )


def _unknown_inside(page: DeclaredPage, order: Order) -> tuple[Extent, tuple[Field, ...]]:
    """Heads and the only field of a page that its kernels alone know: named after them, because
    to others its bytes mean nothing."""
    whole = Extent.whole
    if _heads_outside(order):
        heads, axes = page.heads, (whole("content", page.states * page.content),)
    else:
        heads = whole("head", 1)
        axes = (whole("token", page.states), page.heads, whole("content", page.content))
    name = f"kv of {page.kernels}" if page.kernels else "kv"
    return heads, (Field(name, page.dtype, axes),)


def _places(declaration: CacheDeclaration, order: Order) -> Mapping[str, Page]:
    pages = {page.layer: page for pages in declaration.groups for page in pages}
    places: dict[str, Page] = {}
    for region in declaration.regions:
        for i, layer in enumerate(region.layers):
            if layer in places:
                raise MemoryLayoutError(f"layer {layer!r} has two places")
            if layer in pages:
                start = region.offset + i * region.layer_stride
                places[layer] = _place(pages[layer], region, start, order, declaration.num_blocks)
    return places


def _place(
    page: DeclaredPage, region: DeclaredRegion, start: int, order: Order, num_blocks: int
) -> Page:
    if page.fields:
        return page_in_one_piece(_spec(page, order), order, start, region.block_stride)
    return (Placement(start, region.block_stride, *_inside(page, region, order, num_blocks)),)


def _inside(
    page: DeclaredPage, region: DeclaredRegion, order: Order, num_blocks: int
) -> tuple[int, int]:
    """Head stride and token stride: where a block is one state, the length of what lies together,
    one head's part of a page or all of it."""
    cell = page.cell_bytes
    if not _heads_outside(order):
        whole = page.nbytes, page.nbytes
        return (cell, page.heads.size * cell) if page.in_token_order else whole
    part = page.nbytes // page.heads.size
    step = cell if page.in_token_order else part
    match order:
        case "LHBNC":
            return num_blocks * region.block_stride, step
        case "BHLNC":
            return len(region.layers) * region.layer_stride, step
        case _:
            return part, step


# ── from vLLM's own objects ───────────────────────────────────────────────────────────


def required_layout(vllm_config: EngineConfig, options: ConnectorOptions) -> str | None:
    """The layout to ask vLLM for; None leaves it to vLLM."""
    device = vllm_config.device_config.device_type
    attention = "mla" if vllm_config.model_config.use_mla else "other"
    if options.layout and (device, attention) in CANNOT_VIEW_ROWS:
        return None
    return options.layout or None


def declaration(
    vllm_config: EngineConfig, kv_cache_config: CacheConfig, options: ConnectorOptions
) -> CacheDeclaration:
    """One rank's cache in plain values; MemoryLayoutError for what cannot be taken over."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise MemoryLayoutError("context parallelism spreads a block's tokens over ranks")
    ranks = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    tp = (parallel.rank % ranks[0], ranks[0])
    groups = [group for group in kv_cache_config.kv_cache_groups if group.enable_kv_transfer]
    if any(group.host_resident for group in groups):
        raise MemoryLayoutError("some cache groups live in host memory")
    if options.offloads:
        _check_states(kv_cache_config)
    order = declared_order(kv_cache_config.kv_cache_layout)
    page = _pages(vllm_config, order, tp)
    return CacheDeclaration(
        identity=identity_of(vllm_config, options),
        order=order,
        num_blocks=kv_cache_config.num_blocks,
        groups=tuple(
            tuple(page(name, _spec_of(group, name)) for name in group.layer_names)
            for group in groups
        ),
        regions=tuple(
            DeclaredRegion(
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


def _check_states(kv_cache_config: CacheConfig) -> None:
    """MemoryLayoutError where a block may hold a recurrent state after other tokens than its own
    last one.

    Some kernels save one more state in the middle of a prompt. vLLM puts it into the block before
    the last, whichever prefix it is of: that of the block only if hits end where blocks end.
    """
    specs = {
        group.layer_names[0]: _spec_of(group, group.layer_names[0])
        for group in kv_cache_config.kv_cache_groups
    }
    sizes: set[int] = {spec.block_size for spec in specs.values()}
    sizes |= {kv_cache_config.hash_block_size} if kv_cache_config.hash_block_size else set()
    for layer, spec in specs.items():
        saved = type(spec).__name__ == STATE_KIND and spec.num_prefill_checkpoint_blocks
        others = sorted(sizes - {spec.block_size})
        if saved and others:
            raise MemoryLayoutError(
                f"layer {layer!r}: prefixes end after {others} tokens, too, and its states of "
                f"{spec.block_size}-token blocks may then be those of another prefix\n\n"
                "hint: without --prefix-match-unit, or without host_bytes"
            )


def _pages(
    vllm_config: EngineConfig, order: Order, tp: tuple[int, int]
) -> Callable[[str, Any], DeclaredPage]:
    """The page of a layer, by its name and spec.

    A process has the layers that it computes, and those know their kernels. A scheduler in a
    process of its own has none: its groups tell tokens per block and retention, which is all that
    it needs.
    """
    layers = vllm_config.compilation_config.static_forward_context
    text = getattr(vllm_config.model_config, "hf_text_config", None)
    page = partial(
        declared_page,
        order=order,
        tp=tp,
        total_heads=vllm_config.model_config.get_total_num_kv_heads(),
        device=vllm_config.device_config.device_type,
        state_groups=next((n for name in STATE_GROUPS if (n := getattr(text, name, None))), None),
    )
    return lambda name, spec: page(name, spec, kernels=kernels_of(layers.get(name)))


def _spec_of(group: CacheGroup, layer: str) -> Any:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if type(spec).__name__ == MIXED_KIND else spec


def adopted(declared: CacheDeclaration, tensors: Mapping[str, torch.Tensor]) -> Arena:
    """An arena over vLLM's memory, once addresses and strides are what was declared."""
    order = declared.order
    pages = {page.layer: page for group in declared.groups for page in group}
    names = list(pages)
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
    axes: dict[Any, tuple[str, ...]] = {name: _axes(page, order) for name, page in pages.items()}
    views: dict[Any, torch.Tensor] = {
        name: tensors[name] if page.in_token_order else _opaque(page, tensors[name], order)
        for name, page in pages.items()
    }
    return Arena.adopt(layout, views, axes=axes)


def _axes(page: DeclaredPage, order: Order) -> tuple[str, ...]:
    """Names of the axes of what is adopted: vLLM's own, or those of `_opaque`."""
    if page.in_token_order:
        return ("block", "head", "token", "content")
    return ("block", "content") if page.fields else axes_of(order)


def _opaque(page: DeclaredPage, tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """`[block, head, token, content]` with the inside of a page as one axis; never a copy."""
    try:
        if not page.fields and _heads_outside(order):
            return tensor.view(*tensor.shape[:2], -1)
        inside = tensor if _heads_outside(order) else tensor.transpose(1, 2)
        pages = inside.view(tensor.shape[0], -1)
        return pages.view(torch.uint8) if page.fields else pages
    except RuntimeError as error:
        raise MemoryLayoutError(
            f"layer {page.layer!r}: in {order} the inside of a page is one run, yet strides are "
            f"{tensor.stride()} for {tuple(tensor.shape)}"
        ) from error
