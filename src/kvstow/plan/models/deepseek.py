"""Latent attention (DeepSeek V2, V3 and their kin), with an indexer, and compressed (V4)."""

from math import lcm

from kvstow.plan.models import compressed
from kvstow.plan.models.config import Config
from kvstow.plan.models.decoder import layer_types, num_layers
from kvstow.plan.models.kinds import indexer, latent
from kvstow.plan.models.precision import Plain, Precision, ScaledLatent
from kvstow.plan.models.serving import Serving, Stack
from kvstow.plan.spec import DType, LayerSpec

_RATIO_OF_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def latent_layer(name: str, config: Config, serving: Serving, precision: Precision) -> LayerSpec:
    """One MLA cache: the same on every tensor-parallel rank."""
    serving.shard.divided("attention heads", config.count("num_attention_heads"))
    return latent(
        name,
        block_tokens=serving.tokens,
        latent_dim=config.count("kv_lora_rank"),
        rope_dim=config.count("qk_rope_head_dim"),
        precision=precision,
    )


def latent_decoder(config: Config, serving: Serving) -> Stack:
    """MLA in every layer."""
    precision = serving.precision(config)
    names = (f"model.layers.{i}.self_attn" for i in range(num_layers(config)))
    return Stack(tuple((latent_layer(name, config, serving, precision),) for name in names))


def indexed_decoder(config: Config, serving: Serving) -> Stack:
    """MLA with a sparse-attention index beside it in every layer (V3.2).

    Its kernels read bfloat16 latents or fp8 ones with scales, so fp8 means the latter.
    """
    precision = serving.precision(config)
    notes: tuple[str, ...] = ()
    if precision == Plain(DType.FLOAT8_E4M3):
        precision = ScaledLatent()
        notes = ("fp8 latents of sparse attention carry scales: stored as fp8_ds_mla",)
    key_dim = config.count("index_head_dim")
    layers: list[tuple[LayerSpec, ...]] = []
    for i in range(num_layers(config)):
        name = f"model.layers.{i}.self_attn"
        index = indexer(f"{name}.indexer", block_tokens=serving.tokens, key_dim=key_dim)
        layers.append((latent_layer(name, config, serving, precision), index))
    return Stack(tuple(layers), notes)


def compressed_decoder(config: Config, serving: Serving) -> Stack:
    """DeepSeek-V4: a sliding latent in every layer, and what its ratio adds to it."""
    serving.shard.divided("attention heads", config.count("num_attention_heads"))
    ratios = _ratios(config)
    _refuse_other_dtype(config, serving)
    tokens, notes = _compressed_tokens(config, serving, ratios)
    layers = tuple(
        _compressed_layer(f"model.layers.{i}.attn", config, ratio, tokens)
        for i, ratio in enumerate(ratios)
    )
    return Stack(layers, notes)


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
        ratios = ratios[:total]
    else:
        types = layer_types(config, total)
        if types is None:
            raise config.missing("compress_ratios", "layer_types")
        ratios = [_RATIO_OF_TYPE.get(kind, -1) for kind in types]
    if not set(ratios) <= {0, 4, 128}:
        odd = next(ratio for ratio in ratios if ratio not in (0, 4, 128))
        raise config.error(f"compression ratio {odd} is none of 0, 4 and 128")
    return ratios


def _refuse_other_dtype(config: Config, serving: Serving) -> None:
    if not serving.keeps_own_dtype and serving.kv_dtype not in ("fp8", "fp8_e4m3", "fp8_ds_mla"):
        raise config.error(
            f"its caches have a fixed fp8 format, kv_dtype {serving.kv_dtype!r} cannot be stored",
            "leave kv_dtype out",
        )


def _compressed_tokens(
    config: Config, serving: Serving, ratios: list[int]
) -> tuple[int, tuple[str, ...]]:
    tokens = compressed.BLOCK_TOKENS if serving.block_tokens is None else serving.block_tokens
    whole = lcm(*(ratio for ratio in ratios if ratio), 1)
    if tokens % whole:
        raise config.error(
            f"{tokens} tokens per block do not make whole compressed states of {whole} tokens",
            f"leave block_tokens out for {compressed.BLOCK_TOKENS}, or take a multiple of {whole}",
        )
    if tokens == compressed.BLOCK_TOKENS:
        return tokens, ()
    return tokens, ("the sliding and compressor caches keep their own tokens per block",)


def _compressed_layer(
    name: str, config: Config, ratio: int, block_tokens: int
) -> tuple[LayerSpec, ...]:
    head_dim = config.count("head_dim")
    rope_dim = config.count("qk_rope_head_dim")
    if rope_dim >= head_dim:
        raise config.error(f"qk_rope_head_dim {rope_dim} is not below head_dim {head_dim}")
    sliding = compressed.sliding_latent(
        f"{name}.sliding",
        window=config.count("sliding_window"),
        head_dim=head_dim,
        rope_dim=rope_dim,
    )
    if ratio == 0:
        return (sliding,)
    main = compressed.compressed_latent(
        f"{name}.c{ratio}",
        block_tokens=block_tokens,
        ratio=ratio,
        head_dim=head_dim,
        rope_dim=rope_dim,
    )
    state = compressed.compressor_state(f"{name}.c{ratio}_state", ratio=ratio, dim=head_dim)
    if ratio == 128:
        return main, sliding, state
    key_dim = config.count("index_head_dim")
    index = compressed.compressed_indexer(
        f"{name}.indexer", block_tokens=block_tokens, ratio=ratio, key_dim=key_dim
    )
    index_state = compressed.compressor_state(f"{name}.indexer_state", ratio=ratio, dim=key_dim)
    return main, index, sliding, state, index_state
