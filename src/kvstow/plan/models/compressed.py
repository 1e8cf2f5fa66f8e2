"""DeepSeek-V4's caches: several per layer, each with tokens per block of its own.

    cache       block tokens  states per block   state
    c4          256           64                 latent of 4 tokens
    indexer     256           64                 index key of 4 tokens
    c128        256           2                  latent of 128 tokens
    sliding     64            64                 latent of one token, the last 128
    *_state     4 or 8        4 or 8             what the compressor still has to fold in

A latent is fp8 but for its rotary part, with one scale byte for every 64 elements,
padded to 8 of them. Pages start at multiples of 576 bytes.
"""

from kvstow.plan.models.kinds import ONE_HEAD, content
from kvstow.plan.retention import Full, Retention, Window
from kvstow.plan.spec import DType, Field, LayerSpec

BLOCK_TOKENS = 256
_SLIDING_BLOCK_TOKENS = 64
_ALIGN = 576
_SCALE_GROUP = 64
_SCALE_BYTES_MULTIPLE = 8
_STATE_BLOCK_TOKENS = {4: 4, 128: 8}
_OVERLAP = {4: 2, 128: 1}


def _layer(
    name: str, retention: Retention, block_tokens: int, states: int, fields: tuple[Field, ...]
) -> LayerSpec:
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=block_tokens,
        states=states,
        heads=ONE_HEAD,
        fields=fields,
        align=_ALIGN,
    )


def _latent_fields(head_dim: int, rope_dim: int) -> tuple[Field, ...]:
    groups = -(-(head_dim - rope_dim) // _SCALE_GROUP)
    scales = -(-groups // _SCALE_BYTES_MULTIPLE) * _SCALE_BYTES_MULTIPLE
    return (
        content("latent", DType.FLOAT8_E4M3, head_dim - rope_dim),
        content("rope", DType.BFLOAT16, rope_dim),
        content("scale", DType.UINT8, scales),
    )


def compressed_latent(
    name: str, *, block_tokens: int, ratio: int, head_dim: int, rope_dim: int
) -> LayerSpec:
    """One latent for every `ratio` tokens."""
    return _layer(
        name, Full(), block_tokens, block_tokens // ratio, _latent_fields(head_dim, rope_dim)
    )


def compressed_indexer(name: str, *, block_tokens: int, ratio: int, key_dim: int) -> LayerSpec:
    """One fp8 index key and its scale for every `ratio` tokens."""
    fields = (content("key", DType.FLOAT8_E4M3, key_dim), content("scale", DType.FLOAT32, 1))
    return _layer(name, Full(), block_tokens, block_tokens // ratio, fields)


def sliding_latent(name: str, *, window: int, head_dim: int, rope_dim: int) -> LayerSpec:
    """One latent per token, the last `window` of them."""
    fields = _latent_fields(head_dim, rope_dim)
    return _layer(name, Window(window), _SLIDING_BLOCK_TOKENS, _SLIDING_BLOCK_TOKENS, fields)


def compressor_state(name: str, *, ratio: int, dim: int) -> LayerSpec:
    """Values and scores of the tokens that the compressor has not folded in yet.

    Ratio 4 folds overlapping windows, so it keeps two of each and looks back over
    two windows; ratio 128 keeps one.
    """
    overlap = _OVERLAP[ratio]
    fields = (
        content("value", DType.FLOAT32, overlap * dim),
        content("score", DType.FLOAT32, overlap * dim),
    )
    tokens = _STATE_BLOCK_TOKENS[ratio]
    return _layer(name, Window(overlap * ratio), tokens, tokens, fields)
