"""What one layer's page is, in vLLM's words → in ours.

A page whose kernels keep a token in several sections, one behind the other, is described by its
fields. A page whose kernels keep one token's bytes after the other's is cells of tokens. Of any
other page nothing is said but its size, and whose kernels know more.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from kvstow.errors import MemoryLayoutError
from kvstow.plan.layout import Order
from kvstow.plan.retention import Chunk, Full, Retention, Window
from kvstow.plan.spec import DType, Extent, Field

KINDS = (
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
)
"""vLLM's cache specs that are taken over, by exact name: another kind, a subclass too, may keep
its tokens in another way. By name, so that this module needs no vLLM."""

STATE_KIND = "MambaSpec"
"""Recurrent states. Where vLLM keeps one at the end of each block (`mamba_cache_mode` "align"),
a block holds the state after its last token, and the next token needs that of the last block."""

WHAT_IS_MISSING = {
    "CircularBufferSpec": "one block per request is written in a circle: a prefix has none of its "
    "own, so a hand-over would need the ring as it was after the prefix's last token",
    "CrossAttentionSpec": "the cache is made of the encoder's output, not of tokens: it would have "
    "to be keyed by what was encoded",
}
"""Why caches of other kinds are not taken over, where that is known."""

AFTER_LAST_TOKEN = Window(2)
"""The next token sees the one before it: the block that holds it is all that is needed."""

CONV_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
"""SD, unless vLLM is told DS: a convolution's inputs lie tap by tap, or channel by channel."""

LATENT_KINDS = ("MLAAttentionSpec", "SlidingWindowMLASpec")
"""Every rank holds the whole of these."""

INDEX_BYTES = 132
"""An index key of 128 fp8 numbers and its scale, in DeepSeek-V3.2 and V4."""

NVFP4_MODE, NVFP4_GROUP = 5, 16
"""vLLM's `KVQuantMode.NVFP4`, and how many of its numbers share a scale."""

IN_TOKEN_ORDER = {
    (device, f"vllm.v1.attention.backends.{kernels}"): "0.32.0"
    for device, listed in {
        "cuda": (
            "flash_attn.FlashAttentionImpl",
            "flash_attn_diffkv.FlashAttentionDiffKVImpl",
            "flashinfer.FlashInferImpl",
            "flex_attention.FlexAttentionImpl",
            "triton_attn.TritonAttentionImpl",
            "triton_attn_diffkv.TritonAttentionDiffKVImpl",
            "mla.cutlass_mla.CutlassMLAImpl",
            "mla.flashattn_mla.FlashAttnMLAImpl",
            "mla.flashattn_mla_sparse.FlashAttnMLASparseImpl",
            "mla.flashinfer_mla.FlashInferMLAImpl",
            "mla.flashmla.FlashMLAImpl",
            "mla.flashmla_sparse.FlashMLASparseImpl",
            "mla.triton_mla.TritonMLAImpl",
        ),
        "cpu": ("mla.amx_mla.AMXMLAImpl", "mla.cpu_mla.CPUMLAImpl"),
    }.items()
    for kernels in listed
}
"""Device and kernels that keep `[block, head, token, content]` exactly as the layout's name says,
with the version whose source says so. `content` is a token's key, then its value; or its latent.

    FlashAttentionImpl and the like   kv_cache.transpose(1, 2).split(head_size, -1), then
                                      `reshape_and_cache_flash` by these strides
    ...MLAImpl                        `concat_and_cache_mla`, a slot after the other

By the exact class that writes and reads a layer's pages: on other devices classes with the same
backend name shuffle keys, and subclasses may do anything.
"""

PLAIN_MODES = (0, 1)
"""vLLM's `KVQuantMode` of numbers as they are, and fp8 with one scale for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredPage:
    """One layer as the engine declares it: `states` cells of `content` elements per head.

    `fields` say what a cell is made of, where it is in several sections of a page in one piece.
    With `in_token_order` the cells lie where the order says; otherwise only `kernels` know what
    lies where in a page.
    """

    layer: str
    retention: Retention
    block_tokens: int
    heads: Extent
    states: int
    content: int
    dtype: DType
    fields: tuple[Field, ...] = ()
    in_token_order: bool = False
    kernels: str = ""

    @property
    def cell_bytes(self) -> int:
        return self.content * self.dtype.bits // 8

    @property
    def nbytes(self) -> int:
        return self.heads.size * self.states * self.cell_bytes


def declared_page(
    layer: str,
    spec: Any,
    *,
    order: Order,
    tp: tuple[int, int],
    total_heads: int,
    device: str = "",
    kernels: str = "",
    state_groups: int | None = None,
) -> DeclaredPage:
    """The page of a layer with that spec; MemoryLayoutError for what cannot be taken over.

    `kernels` is the class that writes and reads it on the device, empty where that is not known.
    `state_groups` is how many groups the model's recurrent states have in all.
    """
    if type(spec).__name__ == STATE_KIND:
        return _state_page(layer, spec, tp, order, state_groups)
    if type(spec).__name__ not in KINDS or not isinstance(spec.tokens_per_state, int):
        kind = type(spec).__name__
        why = WHAT_IS_MISSING.get(kind, f"only {', '.join(KINDS)} are")
        raise MemoryLayoutError(f"layer {layer!r}: caches of kind {kind} are not taken over: {why}")
    fields = section_fields(layer, spec) if _pages_in_one_piece(order) else ()
    if fields:
        heads, cell = spec.num_kv_heads, sum(field.nbytes for field in fields)
    else:
        heads, cell = spec.num_heads, spec.state_content_size_bytes
    dtype = DType.UINT8 if fields else DType(str(spec.dtype).removeprefix("torch."))
    content, rest = divmod(cell, dtype.unit)
    if rest:
        dtype, content = DType.UINT8, cell
    return DeclaredPage(
        layer=layer,
        retention=retention_of(spec),
        block_tokens=spec.block_size,
        heads=_heads(layer, spec, heads, tp, total_heads),
        states=spec.num_states,
        content=content,
        dtype=dtype,
        fields=fields,
        in_token_order=not fields and is_in_token_order(spec, device, kernels),
        kernels=kernels.rpartition(".")[2],
    )


def kernels_of(layer: Any) -> str:
    """The class that writes and reads a layer's pages, with its module; empty where there is no
    such layer in this process, or it has no kernels of its own."""
    kernels: object = getattr(layer, "impl", None)
    kind = type(kernels)
    return f"{kind.__module__}.{kind.__qualname__}" if kernels is not None else ""


def is_in_token_order(spec: Any, device: str, kernels: str) -> bool:
    """Whether it is certain that tokens lie one after the other, each a cell for every head."""
    return (
        (device, kernels) in IN_TOKEN_ORDER
        and torch.version.hip is None  # there `cuda` is something else
        and spec.tokens_per_state == 1
        and getattr(spec, "num_head_slots", None) is None
        and getattr(spec, "kv_quant_mode", None) in PLAIN_MODES
    )


def _pages_in_one_piece(order: Order) -> bool:
    return order.index("H") > max(order.index("L"), order.index("B"))


def section_fields(layer: str, spec: Any) -> tuple[Field, ...]:
    """What the kernels keep of a token and head in several sections of a page, one behind the
    other. Empty where they keep it in one, or where it is not known how."""
    fields = _known_sections(spec)
    cell = sum(field.nbytes for field in fields) * getattr(spec, "num_kv_heads", 0)
    declared = spec.num_heads * spec.state_content_size_bytes
    if fields and cell != declared:
        raise MemoryLayoutError(
            f"layer {layer!r}: {declared} bytes for a token in all heads; its kernels keep {cell}: "
            f"{', '.join(f'{x.nbytes} of {x.name}' for x in fields)} for each head"
        )
    return fields


def _known_sections(spec: Any) -> tuple[Field, ...]:
    if torch.version.hip is not None:  # other kernels, which shuffle some of it
        return ()
    kind = getattr(spec, "cache_dtype_str", None), getattr(spec, "model_version", None)
    if kind == ("fp8_ds_mla", "deepseek_v4"):
        return (
            _field("latent", DType.FLOAT8_E4M3, 448, 0),
            _field("rope", DType.BFLOAT16, 64, 0),
            _field("scale", DType.UINT8, 8, 1),
        )
    if str(spec.dtype) == "torch.uint8" and getattr(spec, "head_size", 0) == INDEX_BYTES:
        return (
            _field("key", DType.FLOAT8_E4M3, INDEX_BYTES - 4, 0),
            _field("scale", DType.FLOAT32, 1, 1),
        )
    if getattr(spec, "kv_quant_mode", None) == NVFP4_MODE:
        k, v = spec.head_size, spec.head_size_v
        return (
            _field("k", DType.FLOAT4_E2M1, k, 0),
            _field("k_scale", DType.FLOAT8_E4M3, k // NVFP4_GROUP, 1),
            _field("v", DType.FLOAT4_E2M1, v, 2),
            _field("v_scale", DType.FLOAT8_E4M3, v // NVFP4_GROUP, 3),
        )
    return ()


def _field(name: str, dtype: DType, size: int, section: int) -> Field:
    return Field(name, dtype, (Extent.whole("content", size),), section)


def _state_page(
    layer: str, spec: Any, tp: tuple[int, int], order: Order, state_groups: int | None
) -> DeclaredPage:
    """A recurrent state, padding left out. Where it is not known which channels and heads a rank
    has of it, it is bytes that only its kernels can tell apart."""
    if spec.mamba_cache_mode != "align":
        raise MemoryLayoutError(
            f"layer {layer!r}: recurrent states are kept in mode {spec.mamba_cache_mode!r}, which "
            "has no state for each block\n\nhint: --enable-prefix-caching --mamba-cache-mode align"
        )
    if spec.num_speculative_blocks:
        raise MemoryLayoutError(
            f"layer {layer!r}: {spec.num_speculative_blocks} states of speculative decoding beside "
            "each block's: which one is accepted is not certain"
        )
    fields = state_fields(spec, tp, state_groups) if _pages_in_one_piece(order) else ()
    if fields or spec.tp_replicated:
        heads = Extent.whole("head", 1)
    else:
        heads = Extent("head", tp[1], ((tp[0], tp[0] + 1),))
    return DeclaredPage(
        layer=layer,
        retention=AFTER_LAST_TOKEN,
        block_tokens=spec.block_size,
        heads=heads,
        states=1,
        content=spec.state_content_size_bytes,
        dtype=DType.INT8,
        fields=fields,
        kernels=_state_kernels(spec),
    )


def state_fields(spec: Any, tp: tuple[int, int], num_groups: int | None) -> tuple[Field, ...]:
    """The convolution's inputs and the matrices of a state, in the whole model's channels and
    heads; empty where it is not known which of them this rank has.

        kind         channels of the convolution    matrices
        MAMBA1       x                              channel × state
        MAMBA2       x | B | C                      head × dim × state
        GDN_ATTN     q | k | v                      head × value × key
        SHORT_CONV   x                              none
        LINEAR       none                           head × key × value
    """
    shapes = [tuple(shape) for shape in getattr(spec, "shapes", ())]
    kind = getattr(getattr(spec, "mamba_type", None), "name", "")
    has_conv, has_matrices = kind != "LINEAR", kind != "SHORT_CONV"
    if spec.tp_replicated or len(shapes) != has_conv + has_matrices:
        return ()
    dtypes = [DType(str(each).removeprefix("torch.")) for each in spec.dtypes]
    fields: list[Field] = []
    if has_conv:
        is_tap_first = os.environ.get(CONV_LAYOUT, "SD") == "SD"
        taps, channels = shapes[0] if is_tap_first else shapes[0][::-1]
        parts = _channel_parts(kind, channels, shapes[-1], tp, num_groups)
        if not parts:
            return ()
        axes = Extent.whole("tap", taps), _axis("channel", parts)
        fields.append(Field("conv", dtypes[0], axes if is_tap_first else axes[::-1]))
    if has_matrices:
        heads, *inside = shapes[-1]
        whole = (Extent.whole(f"inside {i}", size) for i, size in enumerate(inside))
        fields.append(Field("state", dtypes[-1], (_axis("head", [_part(heads, tp)]), *whole)))
    return () if any(field.nbytes % fields[-1].dtype.unit for field in fields) else tuple(fields)


def _channel_parts(
    kind: str, channels: int, matrices: tuple[int, ...], tp: tuple[int, int], groups: int | None
) -> "list[Part]":
    """What a convolution's channels are made of; nothing where that is not known."""
    if kind == "SHORT_CONV" or (kind == "MAMBA1" and matrices[0] == channels):
        return [_part(channels, tp)]
    if kind not in ("MAMBA2", "GDN_ATTN") or len(matrices) != 3:
        return []
    inner = matrices[0] * matrices[1]
    size, rest = divmod(channels - inner, 2)
    if size < 1 or rest:
        return []
    if kind == "GDN_ATTN":
        return [_part(size, tp), _part(size, tp), _part(inner, tp)]
    shared = _group_part(size, matrices[2], tp, groups)
    return [_part(inner, tp), shared, shared] if shared else []


Part = tuple[int, int, int]
"""Of a part of an axis: all of it, and from where to where this rank has it."""


def _part(size: int, tp: tuple[int, int]) -> Part:
    """A part that ranks share out evenly."""
    rank, ranks = tp
    return size * ranks, size * rank, size * (rank + 1)


def _group_part(size: int, state: int, tp: tuple[int, int], num_groups: int | None) -> Part | None:
    """The channels of groups: shared out where there are enough of them, and every rank has the
    only one. vLLM adds groups where neither is so: None."""
    if tp[1] == 1:
        return size, 0, size
    if num_groups == 1 and size == state:
        return size, 0, size
    is_even = num_groups is not None and size * tp[1] == num_groups * state
    return _part(size, tp) if is_even else None


def _axis(name: str, parts: Sequence[Part]) -> Extent:
    """Parts one behind the other, of each of which this rank has some."""
    starts = list(accumulate((part[0] for part in parts), initial=0))
    pieces = tuple(
        (start + lo, start + hi) for start, (_, lo, hi) in zip(starts, parts, strict=False)
    )
    return Extent(name, starts[-1], pieces)


def _state_kernels(spec: Any) -> str:
    """What the kernels make of a state's bytes: the same number may be other dtypes or axes."""
    parts = zip(getattr(spec, "dtypes", ()), getattr(spec, "shapes", ()), strict=True)
    return ", ".join(f"{str(d).removeprefix('torch.')} {list(shape)}" for d, shape in parts)


def retention_of(spec: Any) -> Retention:
    """What the next token sees of a cache that one of `KINDS` declares."""
    match type(spec).__name__:
        case "SlidingWindowSpec" | "SlidingWindowMLASpec":
            # speculative decoding of several tokens computes some before the window again
            return Window(spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))
        case "ChunkedLocalAttentionSpec":
            return Chunk(spec.attention_chunk_size)
        case _:
            return Full()


def _heads(layer: str, spec: Any, size: int, tp: tuple[int, int], total: int) -> Extent:
    """Which of the model's `total` heads this rank holds: a part of its own, or one that
    neighbouring ranks hold alike."""
    rank, ranks = tp
    if ranks == 1 or type(spec).__name__ in LATENT_KINDS:
        return Extent.whole("head", size)
    parts = total // size
    slots = spec.num_head_slots if size == spec.num_heads else None
    if slots is not None or parts * size != total or ranks % parts:
        raise MemoryLayoutError(
            f"layer {layer!r}: {size} heads on each of {ranks} ranks, {total} in the model: which "
            "are where is not certain"
        )
    first = rank // (ranks // parts) * size
    return Extent("head", total, ((first, first + size),))
