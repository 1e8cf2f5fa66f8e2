"""Tiny models with random weights, one per family: real architectures, seconds on a CPU.

The windows and kernels are small enough that a few dozen tokens reach every branch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvstow.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 320
"""Bytes, and some room for special tokens."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.6,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_GROUPED_EXPERTS = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_MLA = (
    _MOE
    | _GROUPED_EXPERTS
    | {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
    }
)
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _MOE,
    "mixtral": {"num_local_experts": 4},
    "phi": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": _MOE | _GROUPED_EXPERTS,
    "mistral_full": {"model_type": "mistral", "sliding_window": None},
    "mistral": {"sliding_window": 24},
    "phi3": {"sliding_window": 24},
    "gemma2": {
        "sliding_window": 24,
        "tie_word_embeddings": False,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        "tie_word_embeddings": False,
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": {
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "llama4_text": {"attention_chunk_size": 24},
    "deepseek_v2": _MLA | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _MLA,
    "glm4_moe_lite": _MLA,
    "deepseek_v32": _MLA
    | {
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4096,  # all of the demo's prompts: chosen in parts, entries differ
    },
    "deepseek_v4": _MOE
    | {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 12,
        "n_routed_experts": 4,
        "sliding_window": 24,
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "partial_rotary_factor": 0.5,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
    },
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_d_conv": 4,
        "mamba_dt_rank": 4,
    },
    "bamba": _MAMBA2 | {"attn_layer_indices": [1, 3]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "nemotron_h": {
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "mlp",
            "linear_attention",
        ],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    }
    | _MOE
    | _GROUPED_EXPERTS,
    "kimi_linear": _MLA
    | {
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "full_attention",
            "linear_attention",
        ],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "minimax": {
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "num_local_experts": 4,
        "block_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
}
"""What distinguishes each family; dense, sliding, chunked, latent, sparse, recurrent, mixed.

A second member of a family names its `model_type`.
"""


def tiny_config(model_type: str, sizes: Mapping[str, Any] = {}) -> Any:
    """A configuration of the type: of its family, or the common sizes and those of `sizes` that
    such a configuration has."""
    import transformers

    library: Any = transformers  # some of its functions have no types
    if model_type in FAMILIES:
        return library.AutoConfig.for_model(
            **{"model_type": model_type} | _COMMON | FAMILIES[model_type]
        )
    default: object = library.AutoConfig.for_model(model_type)
    computed = {name for name, each in vars(type(default)).items() if isinstance(each, property)}
    names = set(dir(default)) - computed
    facts = {name: value for name, value in (_COMMON | dict(sizes)).items() if name in names}
    return library.AutoConfig.for_model(model_type, **facts)


def tiny_model(family: str, *, seed: int = 0) -> "PreTrainedModel":
    """A model of the family with weights drawn from `seed`."""
    if family not in FAMILIES:
        raise ModelError(
            f"no tiny model of family {family!r}\n\nhint: one of {', '.join(FAMILIES)}"
        )
    import torch
    import transformers

    random: Any = torch.random
    library: Any = transformers
    with random.fork_rng():
        random.manual_seed(seed)
        model = library.AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    return model.eval()
