"""What a model keeps: from its configuration to the layer specs of one rank.

catalogue   real models by name
config      a model's facts: where they come from, typed questions about them
serving     what the operator chooses: ranks, tokens per block, element types
attention   ordinary decoders, what their layers see, and decoders that read an encoder
deepseek    latent and compressed attention
hybrid      models with recurrent layers, a table

`model_layers` finds a model's family by its `model_type`, and adds nothing to it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstow.plan.models.attention import decoder, encoder_decoder, sharing_decoder, t5
from kvstow.plan.models.catalogue import catalogue, unchecked
from kvstow.plan.models.config import Config, Source, load_model
from kvstow.plan.models.deepseek import (
    compressed_decoder,
    indexed_decoder,
    latent_decoder,
    twin_latent_decoder,
)
from kvstow.plan.models.hybrid import FAMILIES, hybrid_decoder
from kvstow.plan.models.serving import ServingOptions, Stack, stage
from kvstow.plan.spec import LayerSpec

__all__ = ["Config", "Model", "catalogue", "load_model", "model_layers"]

# fmt: off
_ORDINARY = frozenset((
    "arcee", "baichuan", "bloom", "code_llama", "cohere", "cohere2", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "glm",
    "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite",
    "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm2", "llama",
    "llama4", "llama4_text", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3",
    "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "stablelm",
    "starcoder2",
))

NOT_ORDINARY = (
    "attention_layers", "attention_window_size", "attn_config", "attn_type_list", "block_types",
    "cla_share_factor", "compress_ratios", "conv_L_cache", "conv_kernel_size",
    "cross_attention_layers", "global_head_dim", "hybrid_override_pattern", "index_head_dim",
    "inference_state_dtype", "is_encoder_decoder", "layer_group_size", "linear_attn_config",
    "linear_num_heads", "linear_num_value_heads", "mamba_d_state", "mamba_expand",
    "num_kv_shared_layers", "number_of_conv_states", "per_layer_config", "sliding_window_size",
    "ssm_state_size", "state_size", "swa_head_dim", "swa_num_key_value_heads",
)
# fmt: on
"""Keys of models that have other layers than attention."""

READERS: dict[str, Callable[[Config, ServingOptions], Stack]] = {
    **dict.fromkeys(_ORDINARY, decoder),
    **dict.fromkeys(FAMILIES, hybrid_decoder),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), latent_decoder),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), indexed_decoder),
    "deepseek_v4": compressed_decoder,
    "longcat_flash": twin_latent_decoder,
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), sharing_decoder),
    **dict.fromkeys(("whisper", "bart", "mbart", "m2m_100", "marian", "pegasus"), encoder_decoder),
    **dict.fromkeys(("t5", "mt5", "umt5"), t5),
}
"""By `model_type`, what reads the caches of each decoder layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The layers that one rank holds, in the model's order, and what was assumed on the way."""

    name: str
    layers: tuple[LayerSpec, ...]
    notes: tuple[str, ...]
    stage_layers: int
    """Decoder layers of the rank's stage, whether or not they keep anything."""
    total_layers: int
    """Decoder layers of the model."""


def model_layers(
    source: Source,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    pp: int = 1,
    pp_rank: int = 0,
    block_tokens: int | None = None,
    kv_dtype: str | None = None,
) -> Model:
    """The layer specs of one (tp, pp) rank of a model.

    `kv_dtype` None or `auto` is the model's own element type.
    """
    config = load_model(source)
    serving = ServingOptions(tp=tp, rank=tp_rank, block_tokens=block_tokens, kv_dtype=kv_dtype)
    whole = stack(config, serving)
    held = stage(len(whole.layers), pp=pp, pp_rank=pp_rank)
    layers = tuple(layer for i in held for layer in whole.layers[i])
    if not layers:
        raise config.error(f"stage {pp_rank} of {pp} holds no layer that keeps anything")
    return Model(
        name=config.name,
        layers=layers,
        notes=(*whole.notes, *serving.notes(config), *unchecked(config.name, config.facts)),
        stage_layers=len(held),
        total_layers=len(whole.layers),
    )


def stack(config: Config, serving: ServingOptions) -> Stack:
    """The whole model's layers, this tensor-parallel rank's part of each.

    A model that is not known is read by its keys, if they are ordinary ones.
    """
    kind = config.model_type
    if kind in READERS:
        return READERS[kind](config, serving)
    unknown = f"unknown model_type {kind!r}" if kind else "no model_type"
    odd = [key for key in NOT_ORDINARY if config.facts.get(key)]
    if odd:
        raise config.error(
            f"{unknown}, and {odd[0]} says that it is not an ordinary decoder",
            "describe its layers as LayerSpecs",
        )
    has_latents = "kv_lora_rank" in config
    made = (latent_decoder if has_latents else decoder)(config, serving)
    how = "a decoder with latent attention" if has_latents else "an ordinary decoder"
    return replace(made, notes=(f"{unknown}: read as {how}", *made.notes))
