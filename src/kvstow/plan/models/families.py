"""`model_type` → what each decoder layer keeps."""

from dataclasses import replace

from kvstow.plan.models import deepseek, hybrid, seq2seq
from kvstow.plan.models.attention import decoder, sharing_decoder
from kvstow.plan.models.config import Config
from kvstow.plan.models.precision import ServingOptions, Stack

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

_NOT_ORDINARY = (
    "attention_layers", "attention_window_size", "attn_config", "attn_type_list", "block_types",
    "cla_share_factor", "compress_ratios", "conv_L_cache", "conv_kernel_size",
    "cross_attention_layers", "global_head_dim", "hybrid_override_pattern", "index_head_dim",
    "inference_state_dtype", "is_encoder_decoder", "layer_group_size", "linear_attn_config",
    "linear_num_heads", "linear_num_value_heads", "mamba_d_state", "mamba_expand",
    "num_kv_shared_layers", "number_of_conv_states", "per_layer_config", "sliding_window_size",
    "ssm_state_size", "state_size", "swa_head_dim", "swa_num_key_value_heads",
)
# fmt: on


def stack(config: Config, serving: ServingOptions) -> Stack:
    """The whole model's layers, this tensor-parallel rank's part of each."""
    match config.model_type:
        case "deepseek_v2" | "deepseek_v3" | "kimi_k2" | "glm4_moe_lite":
            return deepseek.latent_decoder(config, serving)
        case "longcat_flash":
            return deepseek.twin_latent_decoder(config, serving)
        case "deepseek_v32" | "glm_moe_dsa":
            return deepseek.indexed_decoder(config, serving)
        case "deepseek_v4":
            return deepseek.compressed_decoder(config, serving)
        case "mamba" | "falcon_mamba":
            return hybrid.mamba(config, serving)
        case "mamba2":
            return hybrid.mamba2(config, serving)
        case "jamba":
            return hybrid.jamba(config, serving)
        case "bamba" | "granitemoehybrid":
            return hybrid.bamba(config, serving)
        case "falcon_h1":
            return hybrid.falcon_h1(config, serving)
        case "zamba":
            return hybrid.zamba(config, serving)
        case "zamba2":
            return hybrid.zamba2(config, serving)
        case "nemotron_h":
            return hybrid.nemotron_h(config, serving)
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text":
            return hybrid.qwen3_next(config, serving)
        case "kimi_linear":
            return hybrid.kimi_linear(config, serving)
        case "minimax" | "minimax_text_01" | "minimax_m1":
            return hybrid.minimax(config, serving)
        case "lfm2" | "lfm2_moe":
            return hybrid.lfm2(config, serving)
        case "whisper" | "bart" | "mbart" | "m2m_100" | "marian" | "pegasus":
            return seq2seq.whisper(config, serving)
        case "t5" | "mt5" | "umt5":
            return seq2seq.t5(config, serving)
        case "gemma3n_text" | "gemma4_text":
            return sharing_decoder(config, serving)
        case name if name in _ORDINARY:
            return decoder(config, serving)
        case _:
            return _unknown(config, serving)


def _unknown(config: Config, serving: ServingOptions) -> Stack:
    """A model that is not known, read by its keys, if they are ordinary ones."""
    called = f"unknown model_type {config.model_type!r}" if config.model_type else "no model_type"
    odd = [key for key in _NOT_ORDINARY if config.facts.get(key)]
    if odd:
        raise config.error(
            f"{called}, and {odd[0]} says that it is not an ordinary decoder",
            "describe its layers as LayerSpecs",
        )
    if "kv_lora_rank" in config:
        read, how = deepseek.latent_decoder(config, serving), "a decoder with latent attention"
    else:
        read, how = decoder(config, serving), "an ordinary decoder"
    return replace(read, notes=(f"{called}: read as {how}", *read.notes))
