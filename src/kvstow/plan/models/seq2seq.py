"""Encoder–decoder models: the decoder's own attention, and what it reads of the encoder."""

from kvstow.plan.models.attention import Heads, checked_layers, self_attention
from kvstow.plan.models.config import Config
from kvstow.plan.models.precision import ServingOptions, Stack
from kvstow.plan.retention import Encoder, Full
from kvstow.plan.spec import LayerSpec

_T5_TOKENS = 512


def whisper(config: Config, serving: ServingOptions) -> Stack:
    """Whisper, and text models of the same shape: encoder of a fixed length."""
    heads = config.count("decoder_attention_heads")
    hidden = config.count("d_model")
    if hidden % heads:
        raise config.error(f"d_model {hidden} is not divisible by {heads} decoder_attention_heads")
    dim = hidden // heads
    tokens = config.count("max_source_positions", "max_position_embeddings")
    return _decoder(
        config,
        serving,
        num_layers=checked_layers(config, "decoder_layers"),
        heads=Heads(query=heads, kv=heads, key_dim=dim, value_dim=dim),
        tokens=tokens,
        own="model.decoder.layers.{}.self_attn",
        cross="model.decoder.layers.{}.encoder_attn",
    )


def t5(config: Config, serving: ServingOptions) -> Stack:
    """T5: relative positions, so the encoder's length is an assumption unless stated."""
    heads = config.count("num_heads")
    dim = config.count("d_kv")
    tokens = config.count("n_positions", default=_T5_TOKENS)
    stated = "n_positions" in config
    whence = "n_positions" if stated else "an assumption, no n_positions is given"
    return _decoder(
        config,
        serving,
        num_layers=checked_layers(config, "num_decoder_layers", "num_layers"),
        heads=Heads(query=heads, kv=heads, key_dim=dim, value_dim=dim),
        tokens=tokens,
        own="decoder.block.{}.layer.0.SelfAttention",
        cross="decoder.block.{}.layer.1.EncDecAttention",
        notes=(f"cross-attention is planned for {tokens} encoder tokens ({whence})",),
    )


def _decoder(
    config: Config,
    serving: ServingOptions,
    *,
    num_layers: int,
    heads: Heads,
    tokens: int,
    own: str,
    cross: str,
    notes: tuple[str, ...] = (),
) -> Stack:
    layers: list[tuple[LayerSpec, ...]] = []
    for i in range(num_layers):
        mine = self_attention(own.format(i), config, serving, retention=Full(), heads=heads)
        theirs = self_attention(
            cross.format(i), config, serving, retention=Encoder(tokens), heads=heads
        )
        layers.append((mine, theirs))
    return Stack(tuple(layers), notes)
