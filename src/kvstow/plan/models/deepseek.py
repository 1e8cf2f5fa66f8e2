"""Latent attention (DeepSeek V2, V3 and their kin), with an indexer, and compressed (V4).

    kind              heads   sections, and the cell of one state in each
    latent (MLA)      1       latent  [scale]  rope
    indexer           1       key │ scale
    latent (V4)       1       latent  rope │ scale

DeepSeek-V4 has several caches per layer, each with tokens per block of its own:

    cache       block tokens  states per block   state
    c4          256           64                 latent of 4 tokens
    indexer     256           64                 index key of 4 tokens
    c128        256           2                  latent of 128 tokens
    sliding     64            64                 latent of one token, the last 128
    *_state     4 or 8        4 or 8             what the compressor still has to fold in

A V4 latent is fp8 but for its rotary part, with one scale byte for every 64 elements,
padded to 8 of them, behind all latents of the page. Pages start at multiples of 576 bytes.
"""

from math import lcm

from kvstow.errors import ModelError
from kvstow.plan.models.attention import (
    MOST_LAYERS,
    ONE_HEAD,
    content,
    layer_types,
    num_layers,
    retentions,
)
from kvstow.plan.models.config import Config
from kvstow.plan.models.serving import Precision, ServingOptions, Stack
from kvstow.plan.retention import Full, Retention, Window
from kvstow.plan.spec import DType, Field, LayerSpec
from kvstow.plan.view import align_up, ceil_div

_FULL = Full()
_LATENT_SCALE_GROUP = 128


def _cache(
    name: str,
    block_tokens: int,
    *fields: Field,
    retention: Retention = _FULL,
    ratio: int = 1,
    align: int = 1,
) -> LayerSpec:
    """One head, alike on every rank, with a state for every `ratio` tokens."""
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=block_tokens,
        states=block_tokens // ratio,
        heads=ONE_HEAD,
        fields=fields,
        align=align,
    )


def latent(
    name: str, config: Config, serving: ServingOptions, precision: Precision | None = None
) -> LayerSpec:
    """MLA: one latent and one rotary key per token, the same on every tensor-parallel rank."""
    serving.divided("attention heads", config.count("num_attention_heads"))
    precision = precision or serving.precision(config)
    size, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    dtype = precision.dtype
    match precision.scales:
        case "none":
            fields = content("latent", dtype, size), content("rope", dtype, rope)
        case "latent":
            if size % _LATENT_SCALE_GROUP:
                raise ModelError(
                    f"layer {name!r}: fp8_ds_mla scales latents by {_LATENT_SCALE_GROUP}s, "
                    f"and {size} is not a multiple of it"
                )
            fields = (
                content("latent", dtype, size),
                content("scale", DType.FLOAT32, size // _LATENT_SCALE_GROUP),
                content("rope", DType.BFLOAT16, rope),
            )
        case "head" | "group":
            raise ModelError(
                f"layer {name!r}: latents are not stored with per-head or nvfp4 scales"
                "\n\nhint: use fp8 or fp8_ds_mla"
            )
    return _cache(name, serving.tokens, *fields)


def indexer(
    name: str, *, block_tokens: int, key_dim: int, ratio: int = 1, align: int = 1
) -> LayerSpec:
    """Sparse attention's index: an fp8 key for every `ratio` tokens, and behind all keys of a page
    their float32 scales, as the kernels store them."""
    fields = content("key", DType.FLOAT8_E4M3, key_dim), content("scale", DType.FLOAT32, 1, 1)
    return _cache(name, block_tokens, *fields, ratio=ratio, align=align)


def latent_decoder(config: Config, serving: ServingOptions) -> Stack:
    """MLA in every layer."""
    total = num_layers(config)
    if set(retentions(config, total)) != {Full()}:
        raise config.error(
            "some of its layers see a window, which is not supported with latent attention"
        )
    names = (f"model.layers.{i}.self_attn" for i in range(total))
    return Stack(tuple((latent(name, config, serving),) for name in names))


def twin_latent_decoder(config: Config, serving: ServingOptions) -> Stack:
    """MLA twice in every layer (LongCat)."""
    total = config.count("num_layers", most=MOST_LAYERS)
    names = (f"model.layers.{i}.self_attn" for i in range(total))
    return Stack(
        tuple(tuple(latent(f"{name}.{j}", config, serving) for j in range(2)) for name in names)
    )


def indexed_decoder(config: Config, serving: ServingOptions) -> Stack:
    """MLA with a sparse-attention index beside it in every layer (V3.2).

    Its kernels read bfloat16 latents or fp8 ones with scales, so fp8 means the latter.
    """
    precision = serving.precision(config)
    notes: tuple[str, ...] = ()
    if precision == Precision(DType.FLOAT8_E4M3):
        precision = Precision(DType.FLOAT8_E4M3, "latent")
        notes = ("fp8 latents of sparse attention carry scales: stored as fp8_ds_mla",)
    key_dim = config.count("index_head_dim")
    layers: list[tuple[LayerSpec, ...]] = []
    for i in range(num_layers(config)):
        name = f"model.layers.{i}.self_attn"
        index = indexer(f"{name}.indexer", block_tokens=serving.tokens, key_dim=key_dim)
        layers.append((latent(name, config, serving, precision), index))
    return Stack(tuple(layers), notes)


# ── DeepSeek-V4 ───────────────────────────────────────────────────────────────────────────

_V4_BLOCK_TOKENS = 256
_SLIDING_BLOCK_TOKENS = 64
_ALIGN = 576
_SCALE_GROUP = 64
_SCALE_BYTES_MULTIPLE = 8
_COMPRESSORS = {4: (4, 2), 128: (8, 1)}
"""By ratio, tokens per block of what the compressor still has to fold in, and how many of its
windows overlap: with ratio 4 it looks back over two."""
_RATIO_OF_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def compressed_decoder(config: Config, serving: ServingOptions) -> Stack:
    """DeepSeek-V4: a sliding latent in every layer, and what its ratio adds to it."""
    serving.divided("attention heads", config.count("num_attention_heads"))
    if not serving.keeps_own_dtype and serving.kv_dtype not in ("fp8", "fp8_e4m3", "fp8_ds_mla"):
        raise config.error(
            f"its caches have a fixed fp8 format, kv_dtype {serving.kv_dtype!r} cannot be stored",
            "leave kv_dtype out",
        )
    ratios = _ratios(config)
    tokens = _V4_BLOCK_TOKENS if serving.block_tokens is None else serving.block_tokens
    whole = lcm(*(ratio for ratio in ratios if ratio), 1)
    if tokens % whole:
        raise config.error(
            f"{tokens} tokens per block do not make whole compressed states of {whole} tokens",
            f"leave block_tokens out for {_V4_BLOCK_TOKENS}, or take a multiple of {whole}",
        )
    layers = tuple(
        _compressed_layer(f"model.layers.{i}.attn", config, ratio, tokens)
        for i, ratio in enumerate(ratios)
    )
    note = "the sliding and compressor caches keep their own tokens per block"
    return Stack(layers, () if tokens == _V4_BLOCK_TOKENS else (note,))


def _ratios(config: Config) -> list[int]:
    """Tokens per compressed state in each layer, 0 where nothing is compressed.

    The released list may run on with entries for draft layers, which are not counted.
    """
    total = num_layers(config)
    if "compress_ratios" in config:
        ratios = [0 if ratio == 1 else ratio for ratio in config.counts("compress_ratios")]
        if len(ratios) < total:
            raise config.error(
                f"compress_ratios has {len(ratios)} entries, num_hidden_layers is {total}"
            )
    else:
        types = layer_types(config, total)
        if types is None:
            raise config.missing("compress_ratios", "layer_types")
        ratios = [_RATIO_OF_TYPE.get(kind, -1) for kind in types]
    if odd := [ratio for ratio in ratios[:total] if ratio not in (0, 4, 128)]:
        raise config.error(f"compression ratio {odd[0]} is none of 0, 4 and 128")
    return ratios[:total]


def _compressed_layer(
    name: str, config: Config, ratio: int, block_tokens: int
) -> tuple[LayerSpec, ...]:
    """The caches of one layer: its latents, and what makes them."""
    head_dim, rope_dim = config.count("head_dim"), config.count("qk_rope_head_dim")
    if rope_dim >= head_dim:
        raise config.error(f"qk_rope_head_dim {rope_dim} is not below head_dim {head_dim}")
    scales = align_up(ceil_div(head_dim - rope_dim, _SCALE_GROUP), _SCALE_BYTES_MULTIPLE)
    fields = (
        content("latent", DType.FLOAT8_E4M3, head_dim - rope_dim),
        content("rope", DType.BFLOAT16, rope_dim),
        content("scale", DType.UINT8, scales, 1),
    )
    window = Window(config.count("sliding_window"))
    sliding = _cache(
        f"{name}.sliding", _SLIDING_BLOCK_TOKENS, *fields, retention=window, align=_ALIGN
    )
    if ratio == 0:
        return (sliding,)
    main = _cache(f"{name}.c{ratio}", block_tokens, *fields, ratio=ratio, align=_ALIGN)
    state = _compressor(f"{name}.c{ratio}_state", ratio, head_dim)
    if ratio == 128:
        return main, sliding, state
    key_dim = config.count("index_head_dim")
    index = indexer(
        f"{name}.indexer", block_tokens=block_tokens, key_dim=key_dim, ratio=ratio, align=_ALIGN
    )
    return main, index, sliding, state, _compressor(f"{name}.indexer_state", ratio, key_dim)


def _compressor(name: str, ratio: int, dim: int) -> LayerSpec:
    """Values and scores of the tokens that the compressor has not folded in yet."""
    tokens, overlap = _COMPRESSORS[ratio]
    fields = (content(what, DType.FLOAT32, overlap * dim) for what in ("value", "score"))
    return _cache(name, tokens, *fields, retention=Window(overlap * ratio), align=_ALIGN)
