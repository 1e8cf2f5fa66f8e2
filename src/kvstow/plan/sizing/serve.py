"""The vLLM command that serves what was sized, or why there is none."""

from kvstow.plan.models.catalogue import published, quantisation, repository
from kvstow.plan.models.config import Config
from kvstow.plan.models.serving import element, own_dtype
from kvstow.plan.sizing.cluster import SizeQuestion, Sizing
from kvstow.plan.spec import DType
from kvstow.text import human

UNSERVED = frozenset(("t5", "mt5", "umt5", "bart", "mbart", "m2m_100", "marian", "pegasus"))
"""Model types that vLLM does not have."""

FP8_BESIDE = ("Qwen/Qwen3", "zai-org/GLM-4.")
"""How repositories begin that have one with -FP8 at the end beside them."""


def serve_command(question: SizeQuestion, sizing: Sizing) -> str:
    """The vLLM command that serves it so."""
    split, engine = sizing.deployment, question.engine
    options: dict[str, object] = {
        "tensor-parallel-size": split.tp if split.tp > 1 else None,
        "pipeline-parallel-size": split.pp if split.pp > 1 else None,
        "data-parallel-size": sizing.dp if sizing.dp > 1 else None,
        "enable-expert-parallel": "" if sizing.shares_experts else None,
        "max-model-len": min(question.tokens, longest(question) or question.tokens),
        "gpu-memory-utilization": engine.utilization,
        "kv-cache-dtype": _vllm_dtype(question.config, split.kv_dtype),
        "quantization": "fp8" if question.weights.dtype == "fp8" else None,
        "block-size": split.block_tokens,
        "max-num-batched-tokens": engine.max_batched_tokens,
        "max-num-seqs": engine.max_num_seqs,
        "no-async-scheduling": None if engine.async_scheduling else "",
    }
    words = [f"--{name} {value}" for name, value in options.items() if value is not None]
    return " \\\n    ".join((f"vllm serve {_repository(question)}", *map(str.rstrip, words)))


def not_served(question: SizeQuestion) -> str:
    """Why there is no command: vLLM has no such model or cache, or would load other weights."""
    dtype, config = question.weights.dtype, question.config
    model, facts = question.deployment.model, published(config.name)
    if config.model_type in UNSERVED:
        return f"vLLM has no {config.model_type}"
    if _vllm_dtype(config, question.deployment.kv_dtype) == "float32":
        return "vLLM keeps no float32 cache of such a model"
    if question.weights.loads is not None:
        return f"vLLM would load {human(question.weights.loads)} of weights, not those given"
    if dtype is not None:
        own = "" if "quantization_config" not in config else "fp8"
        if own:
            own = config.inner("quantization_config").text("quant_method", "")
        elif "weights_bytes" in facts:
            own = "other"
        plain_dtype = element(dtype)
        is_own = not own and plain_dtype is not None and plain_dtype is own_dtype(config)
        if not is_own and (dtype != "fp8" or own not in ("", "fp8")):
            return f"vLLM would not load the weights as {dtype}; name a checkpoint that has them so"
    suffix = quantisation(model) if isinstance(model, str) and "/" not in model else ""
    is_beside = suffix == "-fp8" and repository(config.name).startswith(FP8_BESIDE)
    if suffix and not is_beside:
        return f"where {model} is released is not known; give its whole name, organisation/model"
    return ""


def longest(question: SizeQuestion) -> int | None:
    """The most tokens that the model takes, where it says so."""
    config = question.config
    context = published(config.name).get("context")
    key = config.present("max_position_embeddings", "n_positions", "max_target_positions")
    if context is not None or key is None:
        return context
    most = config.count(key)
    scaling = config.present("rope_scaling", "rope_parameters")
    if scaling is None:
        return most
    inner = config.inner(scaling)
    kind, factor = inner.facts.get("rope_type", inner.facts.get("type")), inner.facts.get("factor")
    if not isinstance(factor, int | float) or kind not in ("linear", "dynamic", "yarn"):
        return most
    original = inner.count("original_max_position_embeddings", default=most)
    return int((original if kind == "yarn" else most) * factor)


def _repository(question: SizeQuestion) -> str:
    """Where the model is: its own path, or on the hub, under the name that was typed."""
    model, canonical = question.deployment.model, question.config.name
    name = model if isinstance(model, str) else canonical
    name = name.removesuffix("/config.json")
    published = "" if "/" in name else repository(name.lower().removesuffix("-fp8"))
    if not published:
        return name
    return f"{published}-FP8" if name.lower().endswith("-fp8") else published


def _vllm_dtype(config: Config, kv_dtype: str | None) -> str | None:
    """The cache dtype as vLLM spells it; None for the model's own."""
    if kv_dtype is None or kv_dtype.lower() == "auto":
        return None
    dtype = element(kv_dtype)
    if dtype is None:
        return {"int8": "int8_per_token_head"}.get(kv_dtype.lower(), kv_dtype.lower())
    if dtype is DType.FLOAT32 and own_dtype(config) is dtype:
        return None
    return {DType.FLOAT8_E4M3: "fp8", DType.FLOAT8_E5M2: "fp8_e5m2"}.get(dtype, dtype.value)
