"""How many bytes a model's weights take: an estimate, for sizing alone.

The first of these that is known:

    files       the sizes of the weight files in the model's directory
    formula     parameters counted from the configuration, times the bytes of one
    published   parameters as published, times the bytes of one

The formula counts

    embeddings  vocabulary × width, twice where the output head is not tied
    attention   width × (query + key + value heads) × head size + query heads × head size × width
                with a latent: down and up projections of queries, and of keys and values
    recurrent   projections of Mamba, of a delta net, of a short convolution
    dense       3 × width × intermediate size (2 × where it is not gated)
    experts     (routed + shared) × 3 × width × expert size + width × routed, for the router
    encoders    likewise, with attention to them in each decoder layer

Norms, biases and scales are left out: less than 1 % together. Layers count in the dtype of the
configuration's `quantization_config` where there is one, embeddings in the model's own.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import NamedTuple

from kvstow.errors import ModelError
from kvstow.plan.checkpoint import weight_files
from kvstow.plan.models import NOT_ORDINARY
from kvstow.plan.models.attention import heads_of, heads_of_layer, num_layers, retentions
from kvstow.plan.models.catalogue import published
from kvstow.plan.models.config import Config, Source, load_model
from kvstow.plan.models.hybrid import FAMILIES, Kind
from kvstow.plan.models.serving import element, own_dtype
from kvstow.plan.retention import Full

_NOT_GATED = frozenset(
    ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nemotron", "opt", "phi")
)
_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_ENCODED = ("t5", "mt5", "umt5", "whisper", "bart", "mbart", "m2m_100", "marian", "pegasus")
_OTHERS = (
    "jamba",
    "lfm2",
    "lfm2_moe",
    "gemma3n_text",
    "gemma4_text",
    "deepseek_v32",
    "glm_moe_dsa",
)
_COUNTED = frozenset((*_DELTA_NETS, *_ENCODED, *_OTHERS))
"""Model types that are not ordinary, and whose layers the formula counts all the same."""

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

VOCABULARIES = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_next"), 151_936),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "deepseek_v4"), 129_280),
    "gemma2": 256_000,
    "gemma3_text": 262_208,
    "gpt_oss": 201_088,
    "llama4_text": 202_048,
}
"""By model type, where a configuration does not say: the defaults of transformers' classes."""
USUAL_VOCABULARY = 160_000
"""Of all others."""

GUESS = 0.1
"""By this part of it weights may differ from what is known of a checkpoint, and be its own."""

_SCALES = Fraction(1, 32)
"""Bytes per parameter of the scales, where a few bits have one: 4 for each 128."""


MAX_STARS = 4
"""In an expression that names modules: with more, trying it could take for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Bytes of all weights, in a few words where the number is from, which part of them is
    routed experts, the dtype of the layers, where it is not the checkpoint's, and what of the
    checkpoint the number leaves out."""

    nbytes: int
    how: str
    expert_part: Fraction = Fraction(0)
    dtype: str | None = None
    left_out: tuple[str, ...] = ()
    loads: int | None = None
    """Bytes that the checkpoint has, where others were given and it is known to differ."""


class Parameters(NamedTuple):
    """How many there are, by what they are of: attention and recurrent states, the rest of the
    layers, but for the routed experts, those, embeddings, a vision tower."""

    attention: int
    dense: int
    experts: int
    embeddings: int
    vision: int = 0


def model_weights(model: Source, dtype: str | None = None, nbytes: int | None = None) -> Weights:
    """The bytes of a model's weights, unless they are given; with a `dtype`, of its layers in it.

    Raises ModelError where neither files, configuration nor catalogue tell them.
    """
    config = load_model(model)
    facts = published(config.name)
    part = Fraction(facts.get("experts", 0), facts.get("parameters", 1))
    count, why = None, ""
    try:
        count = parameters(config)
        part = Fraction(count.experts, sum(count))
    except ModelError as error:
        why = str(error).partition("\n")[0].removeprefix(f"{config.name}: ")

    def weights(nbytes: int, how: str, *left_out: str) -> Weights:
        return Weights(nbytes=nbytes, how=how, expert_part=part, dtype=dtype, left_out=left_out)

    if nbytes is not None:
        loads = None
        with suppress(ModelError):
            loads = model_weights(model, dtype).nbytes
        is_other = loads is not None and abs(loads - nbytes) > loads * GUESS
        return replace(weights(nbytes, "as given"), loads=loads if is_other else None)
    if not dtype and (nbytes := _file_bytes(model)):
        return weights(nbytes, "the size of the weight files")
    own = Fraction(own_dtype(config).bits, 8)
    how = f", layers in {dtype}" if dtype else ""
    each, left_out = (weight_bytes(dtype), ()) if dtype else _layer_bytes(config, own)
    drafts = ("draft (MTP) layers",) if any(config.facts.get(key) for key in _DRAFT) else ()
    if count is not None:
        how += f", {_spoken(count.vision)} of them in the vision tower" if count.vision else ""
        left_out += (*_towers(config), *drafts)
        wide = () if dtype else _wide_parts(config)
        sizes = {name: own if name in wide else each for name in ("attention", "dense", "experts")}
        layers = sum(getattr(count, name) * size for name, size in sizes.items())
        nbytes = round(layers + (count.embeddings + count.vision) * own)
        return weights(nbytes, f"{_spoken(sum(count))}, counted from config{how}", *left_out)
    if "parameters" not in facts:
        raise config.error(
            f"the size of the weights is not known: no weight files, and {why}",
            "say --weights-bytes SIZE",
        )
    is_released = not dtype and "quantization_config" not in config
    nbytes = facts.get("weights_bytes", 0) if is_released else 0
    if not nbytes:
        embeddings = 0
        with suppress(ModelError):
            embeddings = 0 if each == own else _embeddings(config)
        nbytes = round((facts["parameters"] - embeddings) * each + embeddings * own)
    how = f"{_spoken(facts['parameters'])}, as published{how}"
    return weights(nbytes, how, *left_out, *drafts)


def vocabulary(config: Config) -> int:
    """How many tokens there are, or usually are."""
    usual = VOCABULARIES.get(config.model_type, USUAL_VOCABULARY)
    usual = published(config.name).get("vocabulary", usual)
    return config.count("vocab_size", default=usual)


def _embeddings(config: Config) -> int:
    """Parameters of the embeddings, and of the output head where it is not tied to them."""
    is_tied = config.flag("tie_word_embeddings", default="gemma" in config.model_type)
    width = config.count("hidden_size", "n_embd", "d_model")
    return (1 if is_tied else 2) * vocabulary(config) * width


def weight_bytes(dtype: str) -> Fraction:
    """Bytes per parameter of layers in that dtype, scales included. Raises ModelError for none."""
    if dtype in _QUANTISED:
        return _QUANTISED[dtype]
    own = element(dtype)
    if own is None:
        names = ", ".join(("bfloat16", "float16", "float32", *_QUANTISED))
        raise ModelError(f"unknown dtype of weights {dtype!r}\n\nhint: one of {names}")
    return Fraction(own.bits, 8)


def parameters(config: Config) -> Parameters:
    """Parameters by what they are of.

    Raises ModelError where the formula does not apply, or lacks a fact.
    """
    kind = config.model_type
    if kind not in _COUNTED and any(config.facts.get(key) for key in NOT_ORDINARY):
        raise config.error("no formula for such layers")
    tokens = config.count("vocab_size")
    if kind in _ENCODED:
        return _encoder_decoder(config, tokens)
    width = config.count("hidden_size", "n_embd")
    kinds = _kinds(config)
    attention = sum(map(sum, (_layer(config, width, kind) for kind in kinds)))
    dense = 0
    forward = [_forward(config, width, i) for i in range(len(kinds))]
    embeddings = _embeddings(config)
    if kind == "gemma4_text":
        attention = _gemma4_attention(config, width)
    if kind in ("gemma3n_text", "gemma4_text"):
        dense, table = _per_layer_inputs(config, width)
        embeddings += table
    return Parameters(
        attention=attention,
        dense=dense + sum(dense for dense, _ in forward),
        experts=sum(experts for _, experts in forward),
        embeddings=embeddings,
        vision=_vision(config) or 0,
    )


def _kinds(config: Config) -> Sequence[Kind]:
    """What each layer has; attention, where all are alike."""
    if config.model_type in FAMILIES:
        return FAMILIES[config.model_type].kinds(config)
    kinds: tuple[Kind, ...] = ("attention",)
    return kinds * num_layers(config)


def _layer(config: Config, width: int, kind: Kind) -> tuple[int, int]:
    """Of a layer's attention, and of what keeps its state."""
    return (
        _attention(config, width) if kind in ("attention", "both") else 0,
        _state(config, width) if kind in ("state", "both") else 0,
    )


def _attention(config: Config, width: int) -> int:
    heads = config.count("num_attention_heads", "n_head")
    if "kv_lora_rank" in config:
        latent, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
        nope, value = config.count("qk_nope_head_dim"), config.count("v_head_dim")
        queries = heads * (nope + rope)
        low = config.count("q_lora_rank") if "q_lora_rank" in config else None
        down = width * queries if low is None else low * (width + queries)
        return down + width * (latent + rope) + heads * (latent * (nope + value) + value * width)
    own = heads_of(config)
    gates = heads if config.model_type in _DELTA_NETS else 0
    return width * own.key_dim * (2 * heads + gates + 2 * own.kv)


def _state(config: Config, width: int) -> int:
    """A recurrent layer: what goes in, what comes out, and what is between."""
    if config.model_type in _DELTA_NETS:
        heads = config.count("linear_num_value_heads")
        value = heads * config.count("linear_value_head_dim")
        key = config.count("linear_num_key_heads") * config.count("linear_key_head_dim")
        return width * (2 * key + 3 * value + 2 * heads)
    if config.model_type == "jamba":
        inner, state = config.count("mamba_expand") * width, config.count("mamba_d_state")
        rank = config.count("mamba_dt_rank", default=ceil(width / 16))
        return 3 * width * inner + inner * (2 * rank + 3 * state)
    return 4 * width * width  # a short convolution, gated twice


def _encoder_decoder(config: Config, tokens: int) -> Parameters:
    """T5 and Whisper: layers of both, attention to the encoder, one table of embeddings."""
    width = config.count("d_model")
    heads = config.count("num_heads", "decoder_attention_heads")
    attention = 4 * width * heads * config.count("d_kv", default=width // heads)
    inner = config.count("d_ff", "decoder_ffn_dim")
    is_gated = config.text("feed_forward_proj", "").startswith("gated")
    forward = (3 if is_gated else 2) * width * inner
    encoder = config.count("num_layers", "encoder_layers")
    decoder = config.count("num_decoder_layers", "decoder_layers", default=encoder)
    heads = 1 if config.flag("tie_word_embeddings", default=True) else 2
    return Parameters(
        attention=(encoder + 2 * decoder) * attention,
        dense=(encoder + decoder) * forward,
        experts=0,
        embeddings=heads * tokens * width,
    )


def _gemma4_attention(config: Config, width: int) -> int:
    """Layers that see everything have heads of their own, and keys that may be values too; the last
    ones have neither keys nor values."""
    total = num_layers(config)
    kept = total - config.count("num_kv_shared_layers", default=0, least=0)
    is_one = config.flag("attention_k_eq_v", default=False)
    parameters = 0
    for i, retention in enumerate(retentions(config, total)):
        sees_all = isinstance(retention, Full)
        heads = heads_of_layer(config, i, sees_all=sees_all)
        sides = (1 if sees_all and is_one else 2) if i < kept else 0
        parameters += width * heads.key_dim * (2 * heads.query + sides * heads.kv)
    return parameters


def _per_layer_inputs(config: Config, width: int) -> tuple[int, int]:
    """What Gemma 3n and 4 have beside: in their layers, and a second table of embeddings, which has
    a row of each layer for each token."""
    count, is_3n = config.count("num_hidden_layers"), config.model_type == "gemma3n_text"
    each = config.count("hidden_size_per_layer_input", default=256, least=0)
    rank = config.count("laurel_rank", default=64) if is_3n else 0
    streams = config.count("altup_num_inputs") if is_3n else 1
    layers = count * width * (3 * each + 2 * rank) + 2 * (streams - 1) * width * width
    return layers, config.count("vocab_size_per_layer_input", default=262_144) * count * each


def _forward(config: Config, width: int, layer: int) -> tuple[int, int]:
    """The feed-forward parameters of one layer, without its routed experts, and those."""
    routed = config.present("num_experts", "num_local_experts", "n_routed_experts")
    if routed is None or not _has_experts(config, layer):
        dense = config.facts.get("intermediate_size")
        if isinstance(dense, list):
            return 3 * width * config.counts("intermediate_size")[layer], 0
        inner = config.count("intermediate_size_mlp", "intermediate_size", default=4 * width)
        return (2 if config.model_type in _NOT_GATED else 3) * width * inner, 0
    experts = config.count(routed)
    size = config.count("moe_intermediate_size", "intermediate_size")
    shared = config.count("n_shared_experts", default=0, least=0) * size
    if config.model_type.startswith("llama4"):
        shared = size
    if config.model_type == "gemma4_text":
        shared = config.count("intermediate_size")
    if "shared_expert_intermediate_size" in config:
        shared = config.count("shared_expert_intermediate_size")
    return width * (3 * shared + experts), 3 * width * experts * size


def _has_experts(config: Config, layer: int) -> bool:
    dense = config.facts.get("first_k_dense_replace")
    if layer < (dense if isinstance(dense, int) else 0):
        return False
    if "expert_layer_period" in config:
        offset = config.count("expert_layer_offset", default=0, least=0)
        return layer % config.count("expert_layer_period") == offset
    return (layer + 1) % config.count(
        "interleave_moe_layer_step", "decoder_sparse_step", default=1
    ) == 0


def _layer_bytes(config: Config, own: Fraction) -> tuple[Fraction, tuple[str, ...]]:
    """Bytes per parameter of the layers, and what is left out for want of knowing it."""
    if "quantization_config" not in config:
        return own, ()
    quantised = config.inner("quantization_config")
    method = quantised.text("quant_method", "")
    if method.startswith("modelopt"):
        method = quantised.text("quant_algo", "").lower()
        method = "fp8" if method.startswith("fp8_") else method
    match method:
        case "awq" | "gptq":
            bits = quantised.count("bits", default=4)
        case "bitsandbytes":
            bits = 4 if quantised.flag("load_in_4bit", default=False) else 8
        case "compressed-tensors":
            bits, scales = _widest(quantised.inner("config_groups"))
            return Fraction(bits, 8) + scales, ()
        case _:
            unknown = () if method in _QUANTISED else (f"quantisation {method!r}",)
            return _QUANTISED.get(method, own), unknown
    return Fraction(bits, 8) + _SCALES, ()


def _towers(config: Config) -> tuple[str, ...]:
    """Encoders of images and sound that are not counted."""
    towers = ("the vision tower",) if _vision(config) is None else ()
    return (*towers, "the audio tower") if "audio_config" in config else towers


def _vision(config: Config) -> int | None:
    """Parameters of a vision tower's layers: attention and a feed-forward, gated or not; None where
    the configuration does not say."""
    if "vision_config" not in config:
        return 0
    vision = config.inner("vision_config")
    try:
        width = vision.count("hidden_size", "embed_dim", "vt_hidden_size")
        inner = vision.count("intermediate_size", "vt_intermediate_size", default=4 * width)
        depth = vision.count("num_hidden_layers", "depth", "vt_num_hidden_layers")
    except ModelError:
        return None
    return depth * (4 * width + 3 * inner) * width


def _widest(groups: Config) -> tuple[int, Fraction]:
    """The most bits that a group of layers has for a weight, and bytes per parameter of scales: two
    for each of its own groups of parameters."""
    each = [groups.inner(name) for name in groups.facts]
    weights = [group.inner("weights") for group in each if "weights" in group]
    if not weights:
        return 16, Fraction(0)
    most = max(weights, key=lambda each: each.count("num_bits"))
    size = most.count("group_size", default=0, least=-1)
    return most.count("num_bits"), Fraction(2, size) if size > 0 else _SCALES


def _wide_parts(config: Config) -> tuple[str, ...]:
    """The parts of the layers that a quantised checkpoint keeps in the model's own dtype, as a
    module of each in the last layer shows."""
    if "quantization_config" not in config:
        return ()
    quantised = config.inner("quantization_config")
    key = quantised.present("ignore", "exclude_modules")
    patterns = () if key is None else quantised.texts(key)
    shared = config.present("n_shared_experts", "shared_expert_intermediate_size")
    inner = {"n_shared_experts": "shared_experts.", None: ""}.get(shared, "shared_expert.")
    modules = {
        "attention": "self_attn.o_proj",
        "dense": f"mlp.{inner}down_proj",
        "experts": "mlp.experts.0.down_proj",
    }
    last = f"model.layers.{num_layers(config) - 1}"
    return tuple(
        part
        for part, module in modules.items()
        if any(_matches(each, f"{last}.{module}") for each in patterns)
    )


def _matches(pattern: str, module: str) -> bool:
    """Whether a module is meant: by `re:` and an expression, its name or one before a dot, or a
    pattern with stars, under whatever name the language model has."""
    expression = pattern.removeprefix("re:")
    if expression == pattern:
        start, layers, end = pattern.rpartition("layers.")
        own = f"*{layers}{end}" if start else pattern
        return fnmatchcase(module, own) or fnmatchcase(module, f"{own}.*")
    rest = expression.replace(".*", "").replace(r"\d+", "")
    if any(sign in rest for sign in "*+?{") or expression.count("*") > MAX_STARS:
        return False
    with suppress(re.error):
        return re.match(expression, module) is not None
    return False


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
