"""How many bytes a model's weights take: an estimate, for sizing alone.

The first of these that is known:

    files       the sizes of the weight files in the model's directory
    formula     parameters counted from the configuration, times the bytes of one
    published   parameters as published, times the bytes of one

The formula is for decoders of attention and feed-forward layers:

    embeddings  vocabulary × width, twice where the output head is not tied
    attention   width × (query + key + value heads) × head size + query heads × head size × width
                with a latent: down and up projections of queries, and of keys and values
    dense       3 × width × intermediate size (2 × where it is not gated)
    experts     (routed + shared) × 3 × width × expert size + width × routed, for the router

Norms, biases and scales are left out: less than 1 % together. Layers count in the dtype of the
configuration's `quantization_config` where there is one, embeddings in the model's own.
"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from kvstow.errors import ModelError
from kvstow.plan.checkpoint import weight_files
from kvstow.plan.models.catalogue import published
from kvstow.plan.models.config import Config, Source, load_model
from kvstow.plan.models.precision import element, own_dtype

_NOT_GATED = frozenset(
    ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nemotron", "opt", "phi")
)
_NOT_COUNTED = (
    "compress_ratios",
    "conv_L_cache",
    "hybrid_override_pattern",
    "is_encoder_decoder",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "state_size",
)
"""Keys of models that have other layers than the formula counts."""

_QUANTISED = {
    "fp8": Fraction(1),
    "fbgemm_fp8": Fraction(1),
    "int8": Fraction(1),
    "int4": Fraction(17, 32),
    "mxfp4": Fraction(17, 32),  # 4 bits, and 8 for the scale of 32
    "nvfp4": Fraction(9, 16),  # 4 bits, and 8 for the scale of 16
}
"""Bytes per parameter of the layers, by `quant_method` or as people say it."""

_DRAFT = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of layers for speculative decoding: loaded only by engines that are told to use them."""

_SCALES = Fraction(1, 32)
"""Bytes per parameter of the scales, where a few bits have one: 4 for each 128."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Bytes of all weights, and in a few words where the number is from."""

    nbytes: int
    how: str


def model_weights(model: Source, dtype: str | None = None) -> Weights:
    """The bytes of a model's weights; with a `dtype`, of its layers in that one.

    Raises ModelError where neither files, configuration nor catalogue tell them.
    """
    nbytes = 0 if dtype else _file_bytes(model)
    if nbytes:
        return Weights(nbytes=nbytes, how="the size of the weight files")
    config = load_model(model)
    own = Fraction(own_dtype(config).bits, 8)
    each, how = (
        (weight_bytes(dtype), f", layers in {dtype}") if dtype else _layer_bytes(config, own)
    )
    try:
        layers, embeddings = parameters(config)
    except ModelError as error:
        why = str(error).partition("\n")[0].removeprefix(f"{config.name}: ")
    else:
        vision = _vision(config)
        how += f", {_spoken(vision)} of them in its vision tower" if vision else ""
        how += ", draft layers left out" if any(config.facts.get(key) for key in _DRAFT) else ""
        nbytes = round(layers * each + (embeddings + vision) * own)
        count = _spoken(layers + embeddings + vision)
        return Weights(nbytes=nbytes, how=f"{count} counted from config{how}")
    known = published(config.name)
    if "parameters" not in known:
        raise config.error(
            f"the size of the weights is not known: no weight files, and {why}",
            "say --weights-bytes SIZE",
        )
    nbytes = 0 if dtype else known.get("weights_bytes", 0)
    nbytes = nbytes or round(known["parameters"] * each)
    return Weights(nbytes=nbytes, how=f"{_spoken(known['parameters'])} as published{how}")


def weight_bytes(dtype: str) -> Fraction:
    """Bytes per parameter of layers in that dtype, scales included. Raises ModelError for none."""
    if dtype in _QUANTISED:
        return _QUANTISED[dtype]
    own = element(dtype)
    if own is None:
        known = ", ".join(("bfloat16", "float16", "float32", *_QUANTISED))
        raise ModelError(f"unknown dtype of weights {dtype!r}\n\nhint: one of {known}")
    return Fraction(own.bits, 8)


def parameters(config: Config) -> tuple[int, int]:
    """Parameters of all layers, and of the embeddings.

    Raises ModelError where the formula does not apply, or lacks a fact.
    """
    if any(config.facts.get(key) for key in _NOT_COUNTED):
        raise config.error("no formula for such layers")
    vocabulary = config.count("vocab_size")
    width = config.count("hidden_size", "n_embd")
    num_layers = config.count("num_hidden_layers", "n_layer")
    forward = sum(_forward(config, width, layer) for layer in range(num_layers))
    attention = num_layers * _attention(config, width)
    heads = 1 if config.flag("tie_word_embeddings", default=False) else 2
    return forward + attention, heads * vocabulary * width


def _attention(config: Config, width: int) -> int:
    heads = config.count("num_attention_heads", "n_head")
    if "kv_lora_rank" in config:
        latent, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
        nope, value = config.count("qk_nope_head_dim"), config.count("v_head_dim")
        queries = heads * (nope + rope)
        low = config.count("q_lora_rank") if "q_lora_rank" in config else None
        asked = width * queries if low is None else low * (width + queries)
        return asked + width * (latent + rope) + heads * (latent * (nope + value) + value * width)
    size = config.count("head_dim", default=width // heads)
    kv_heads = config.count("num_key_value_heads", default=heads)
    return 2 * width * size * (heads + kv_heads)


def _forward(config: Config, width: int, layer: int) -> int:
    """The feed-forward parameters of one layer, of all its experts."""
    routed = config.present("num_experts", "num_local_experts", "n_routed_experts")
    if routed is None or not _has_experts(config, layer):
        dense = config.count("intermediate_size_mlp", "intermediate_size", default=4 * width)
        return (2 if config.model_type in _NOT_GATED else 3) * width * dense
    experts = config.count(routed)
    size = config.count("moe_intermediate_size", "intermediate_size")
    shared = config.count("n_shared_experts", default=0, least=0) * size
    if config.model_type.startswith("llama4"):
        shared = size
    if "shared_expert_intermediate_size" in config:
        shared = config.count("shared_expert_intermediate_size")
    return 3 * width * (experts * size + shared) + width * experts


def _has_experts(config: Config, layer: int) -> bool:
    dense = config.facts.get("first_k_dense_replace")
    step = config.count("interleave_moe_layer_step", "decoder_sparse_step", default=1)
    return layer >= (dense if isinstance(dense, int) else 0) and (layer + 1) % step == 0


def _layer_bytes(config: Config, own: Fraction) -> tuple[Fraction, str]:
    """Bytes per parameter of the layers, and what is to be said about them."""
    if "quantization_config" not in config:
        return own, ""
    quantised = config.inner("quantization_config")
    method = quantised.text("quant_method", "")
    match method:
        case "awq" | "gptq":
            bits = quantised.count("bits", default=4)
        case "bitsandbytes":
            bits = 4 if quantised.flag("load_in_4bit", default=False) else 8
        case "compressed-tensors":
            bits = _widest(quantised.inner("config_groups"))
        case "modelopt":
            method = quantised.text("quant_algo", "").lower()
            if method not in _QUANTISED:
                return own, f", quantisation {method!r} left out"
            return _QUANTISED[method], ""
        case _ if method in _QUANTISED:
            return _QUANTISED[method], ""
        case _:
            return own, f", quantisation {method!r} left out"
    return Fraction(bits, 8) + _SCALES, ""


def _vision(config: Config) -> int:
    """Parameters of a vision tower's layers: attention and a feed-forward, gated or not."""
    if "vision_config" not in config:
        return 0
    vision = config.inner("vision_config")
    try:
        width = vision.count("hidden_size", "embed_dim")
        inner = vision.count("intermediate_size", default=4 * width)
        depth = vision.count("num_hidden_layers", "depth")
    except ModelError:
        return 0
    return depth * (4 * width + 3 * inner) * width


def _widest(groups: Config) -> int:
    """The most bits that a group of layers has for a weight."""
    each = [groups.inner(name) for name in groups.facts]
    return max(
        (group.inner("weights").count("num_bits") for group in each if "weights" in group),
        default=16,
    )


def _file_bytes(model: Source) -> int:
    """Bytes of the weight files beside a configuration; 0 where there are none."""
    if not isinstance(model, str | Path):
        return 0
    folder = Path(model).expanduser()
    folder = folder.parent if folder.name == "config.json" else folder
    try:
        return sum(file.stat().st_size for file in weight_files(folder))
    except (OSError, ValueError):
        return 0


def _spoken(count: int) -> str:
    if count >= 10**9:
        return f"{count / 10**9:.4g} billion parameters"
    return f"{count / 10**6:.4g} million parameters"
