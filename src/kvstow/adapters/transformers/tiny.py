# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
"""Tiny models with random weights, one per family: real architectures, seconds on a CPU.

The windows and kernels are small enough that a few dozen tokens reach every branch.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvstow.errors import ModelError

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
_MLA = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
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
    "qwen3": {},
    "mistral": {"sliding_window": 24},
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
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 1024},
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
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
}
"""What distinguishes each family; dense, sliding, chunked, latent, sparse, recurrent, mixed."""

EAGER = frozenset({"gpt_oss"})
"""Families without an attention of torch's own: their sinks need the plain one."""


def tiny_model(family: str, *, seed: int = 0) -> PreTrainedModel:
    """A model of the family with weights drawn from `seed`."""
    if family not in FAMILIES:
        raise ModelError(f"no tiny {family!r}\n\nhint: one of {', '.join(FAMILIES)}")
    config = AutoConfig.for_model(family, **(_COMMON | FAMILIES[family]))
    attention = "eager" if family in EAGER else "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
    return model.eval()
