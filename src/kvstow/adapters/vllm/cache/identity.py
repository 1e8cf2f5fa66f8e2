"""Which computation fills vLLM's cache: its checkpoint, and everything that it is started with."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstow.adapters.vllm.engine import EngineConfig
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.errors import ModelError
from kvstow.plan.identity import TOKEN_ORDERED, Identity, config_fields

CPU_INTERIOR = "cpu-transposed"
"""vLLM's plain CPU kernels keep keys transposed over the whole block. A name for all CPU kernels,
so that nothing of theirs is taken for what others keep; `pages.IN_TOKEN_ORDER` tells which of
them a route may look into."""

RUNNING_FIELDS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "sliding_window",
    "attention_chunk_size",
)
"""Fields that arguments of the engine may change from what the checkpoint says."""

MODEL_SETTINGS = ("quantization_config", "model_class_overrides")
CACHE_SETTINGS = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
IMAGE_SETTINGS = (
    "mm_processor_kwargs",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
"""Settings of vLLM's that change numbers and that no checkpoint has. What a request says of its
images is in their hashes; what the engine says is not."""

WEIGHT_FILES = {"pt": "*.pt", "npcache": "*.bin", "mistral": "consolidated*.safetensors"}
"""Weights that vLLM loads, by its load format, where it is not the first format that is there."""

LONG_ROPES = ("'longrope'", "'su'")

HINT = (
    'hint: "kv_connector_extra_config": {"unverified": "why"}, where all instances and stores are '
    "known to run the same weights"
)


def identity_of(vllm_config: EngineConfig, options: ConnectorOptions) -> Identity:
    """Which computation fills the cache: weights, configuration as it runs, cache dtype, kernels.

    Raises ModelError where the weights cannot be looked at, unless `options.unverified` says
    why that is fine.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    name = options.model or os.path.basename(os.path.normpath(model.model))
    own = str(model.dtype).removeprefix("torch.")
    kv_dtype = own if cache.cache_dtype == "auto" else str(cache.cache_dtype)
    if options.unverified:
        unseen = Identity.unverified(options.unverified, model=name, kv_dtype=kv_dtype)
        return replace(unseen, config=config_fields({"run": _settings(vllm_config, seen=False)}))
    if getattr(cache, "calculate_kv_scales", False):
        raise ModelError(
            "vLLM computes its cache's scales while it runs: bytes of two engines mean different "
            "numbers\n\nhint: use a checkpoint with scales, without --calculate-kv-scales"
        )
    cpu = vllm_config.device_config.device_type == "cpu"
    found = Identity.of(
        _checkpoint(vllm_config),
        model=name,
        kv_dtype=kv_dtype,
        interior=CPU_INTERIOR if cpu else TOKEN_ORDERED,
        trust_remote_code=bool(getattr(model, "trust_remote_code", False)),
        weight_files=WEIGHT_FILES.get(str(vllm_config.load_config.load_format), ""),
    )
    running = config_fields({"run": _settings(vllm_config, seen=True)})
    return replace(found, config=tuple(sorted((*found.config, *running))))


def _settings(vllm_config: EngineConfig, *, seen: bool) -> dict[str, Any]:
    """What the engine runs with that changes its cache, and is not in the checkpoint. Unless it
    was `seen`, somebody vouches for what has no name."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    images, text = (getattr(model, name, None) for name in ("multimodal_config", "hf_text_config"))
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": getattr(model, "quantization", None),
        **{field: getattr(text, field, None) for field in RUNNING_FIELDS},
        **_replaced(model, seen=seen),
        **{name: _text(getattr(model, name, None)) for name in MODEL_SETTINGS},
        **{name: _text(getattr(cache, name, None)) for name in CACHE_SETTINGS},
        **{name: _text(getattr(images, name, None)) for name in IMAGE_SETTINGS},
        "long_rope": _long_rope(model),
        "draft": _draft(vllm_config) if seen else None,
    }


def _text(value: Any) -> str | None:
    return None if value in (None, "", "auto", {}) else str(value)


def _replaced(model: Any, *, seen: bool) -> dict[str, Any]:
    """What somebody has put into the place of the checkpoint's own configuration."""
    overrides: Any = getattr(model, "hf_overrides", None) or {}
    if callable(overrides) and not seen:
        return {}
    if callable(overrides):
        raise ModelError(
            f"{model.model}: its configuration is changed by a function, {overrides!r}: what it "
            f"does has no name\n\n{HINT}"
        )
    other = getattr(model, "hf_config_path", None)
    return {"overrides": overrides, "config": model.hf_config.to_dict() if other else {}}


def _long_rope(model: Any) -> str | None:
    """Which of its two ropes a model with LongRoPE uses: vLLM decides by the longest request that
    it allows."""
    text = getattr(model, "hf_text_config", None)
    ropes = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    if not any(kind in repr(ropes) for kind in LONG_ROPES):
        return None
    name = "original_max_position_embeddings"
    said = [getattr(text, name, None), *(rope.get(name) for rope in ropes if rope)]
    original = next((each for each in said if each), None)
    if original is None:
        return f"of {model.max_model_len} tokens"
    return "long" if model.max_model_len > original else "short"


def _draft(vllm_config: EngineConfig) -> str | None:
    """The weights of a model that drafts tokens, where it has its own: its cache is in the rows."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is None or draft.model == vllm_config.model_config.model:
        return None
    folder = _folder(draft)
    return Identity.of(folder).weights if folder else str(draft.model)


def _checkpoint(vllm_config: EngineConfig) -> Path:
    """The folder that vLLM has read its weights from."""
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        raise ModelError(f"{model.model}: its weights are made up (load_format dummy)\n\n{HINT}")
    folder = _folder(model)
    if folder is None:
        raise ModelError(f"{model.model}: neither a folder nor in the hub's cache\n\n{HINT}")
    return folder


def _folder(model: Any) -> Path | None:
    """Where a model lies, in the hub's cache perhaps."""
    if os.path.isdir(model.model):
        return Path(model.model)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    return Path(config).parent if isinstance(config, str) else None
