"""The kinds of attention cache: one constructor each, page sizes exact.

    kind              heads        cell of one head and state
    attention         kv heads     k  v  [k_scale v_scale]
    latent (MLA)      1            latent  [scale]  rope
    indexer           1            key  scale

Recurrent kinds are in `recurrent`, DeepSeek-V4's in `compressed`.
"""

from kvstow.errors import ModelError
from kvstow.plan.models.precision import NvFp4, PerTokenHead, Plain, Precision, ScaledLatent
from kvstow.plan.retention import Full, Retention
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

ONE_HEAD = Extent.whole("head", 1)
_LATENT_SCALE_GROUP = 128
_NVFP4_SCALE_GROUP = 16


def content(name: str, dtype: DType, size: int) -> Field:
    """A field that is one run of `size` elements per cell, alike on every rank."""
    return Field(name, dtype, (Extent.whole("content", size),))


def attention(
    name: str,
    *,
    retention: Retention,
    block_tokens: int,
    heads: Extent,
    key_dim: int,
    value_dim: int,
    precision: Precision,
) -> LayerSpec:
    """Keys and values of each token, per kv head: `key_dim + value_dim` elements and scales."""
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=block_tokens,
        states=block_tokens,
        heads=heads,
        fields=_key_value_fields(name, key_dim, value_dim, precision),
    )


def _key_value_fields(
    name: str, key_dim: int, value_dim: int, precision: Precision
) -> tuple[Field, ...]:
    match precision:
        case Plain(dtype):
            return content("k", dtype, key_dim), content("v", dtype, value_dim)
        case PerTokenHead(dtype):
            return (
                content("k", dtype, key_dim),
                content("v", dtype, value_dim),
                content("k_scale", DType.FLOAT32, 1),
                content("v_scale", DType.FLOAT32, 1),
            )
        case NvFp4():
            return _nvfp4_fields(name, key_dim, value_dim)
        case ScaledLatent():
            raise ModelError(
                f"layer {name!r}: fp8_ds_mla stores latents, and this layer keeps keys and values"
                "\n\nhint: use fp8 or fp8_per_token_head"
            )


def _nvfp4_fields(name: str, key_dim: int, value_dim: int) -> tuple[Field, ...]:
    for dim in (key_dim, value_dim):
        if dim % _NVFP4_SCALE_GROUP:
            raise ModelError(
                f"layer {name!r}: nvfp4 needs head dims in multiples of "
                f"{_NVFP4_SCALE_GROUP}, not {dim}"
            )
    return (
        content("k", DType.FLOAT4_E2M1, key_dim),
        content("v", DType.FLOAT4_E2M1, value_dim),
        content("k_scale", DType.FLOAT8_E4M3, key_dim // _NVFP4_SCALE_GROUP),
        content("v_scale", DType.FLOAT8_E4M3, value_dim // _NVFP4_SCALE_GROUP),
    )


def latent(
    name: str, *, block_tokens: int, latent_dim: int, rope_dim: int, precision: Precision
) -> LayerSpec:
    """MLA: one latent and one rotary key per token, alike on every rank."""
    return LayerSpec(
        name=name,
        retention=Full(),
        block_tokens=block_tokens,
        states=block_tokens,
        heads=ONE_HEAD,
        fields=_latent_fields(name, latent_dim, rope_dim, precision),
    )


def _latent_fields(
    name: str, latent_dim: int, rope_dim: int, precision: Precision
) -> tuple[Field, ...]:
    match precision:
        case Plain(dtype):
            return content("latent", dtype, latent_dim), content("rope", dtype, rope_dim)
        case ScaledLatent():
            if latent_dim % _LATENT_SCALE_GROUP:
                raise ModelError(
                    f"layer {name!r}: fp8_ds_mla scales latents by {_LATENT_SCALE_GROUP}s, "
                    f"and {latent_dim} is not a multiple of it"
                )
            return (
                content("latent", DType.FLOAT8_E4M3, latent_dim),
                content("scale", DType.FLOAT32, latent_dim // _LATENT_SCALE_GROUP),
                content("rope", DType.BFLOAT16, rope_dim),
            )
        case PerTokenHead() | NvFp4():
            raise ModelError(
                f"layer {name!r}: latents are not stored with per-head or nvfp4 scales"
                "\n\nhint: use fp8 or fp8_ds_mla"
            )


def indexer(name: str, *, block_tokens: int, key_dim: int) -> LayerSpec:
    """Sparse attention's index: one fp8 key and its float32 scale per token."""
    return LayerSpec(
        name=name,
        retention=Full(),
        block_tokens=block_tokens,
        states=block_tokens,
        heads=ONE_HEAD,
        fields=(content("key", DType.FLOAT8_E4M3, key_dim), content("scale", DType.FLOAT32, 1)),
    )
