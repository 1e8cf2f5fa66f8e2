"""Layers as transformers sees them: its configuration classes are the oracle."""

from typing import Any

import pytest

from kvstow.plan.models import model_layers
from kvstow.plan.models.config import CLASS_DEFAULTS
from kvstow.plan.retention import Chunk, Encoder, Full, State, Window

transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")
mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = {
    "full_attention": Full,
    "attention": Full,
    "sliding_attention": Window,
    "chunked_attention": Chunk,
    "linear_attention": State,
    "mamba": State,
    "conv": State,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 20},
    "qwen2_moe": {"use_sliding_window": True},
    "qwen3": {"use_sliding_window": True},
    "qwen3_moe": {"use_sliding_window": True},
    "phi": {},
    "phi3": {"sliding_window": 64},
    "gemma2": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "llama4_text": {},
    "cohere2": {},
    "starcoder2": {"sliding_window": 64},
    "glm": {},
    "glm4": {},
    "jamba": {},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "kimi_linear": {},
    "minimax": {},
    "lfm2": {"full_attn_idxs": [2, 5, 8]},
    "mamba": {},
    "mamba2": {},
    "olmo3": {},
    "smollm3": {},
}


def oracle(config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    return cache_utils.get_layer_types_and_kwargs(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_layer_kinds_and_windows_are_those_of_transformers(model_type: str) -> None:
    config = mapping[model_type](**FAMILIES[model_type])
    layers = model_layers(config.to_dict()).layers
    types, options = oracle(config)
    if model_type.startswith("mamba"):
        types = ["mamba"] * config.num_hidden_layers
    assert [type(layer.retention) for layer in layers] == [KINDS[kind] for kind in types]
    for layer, option in zip(layers, options, strict=False):
        match layer.retention:
            case Window(tokens) | Chunk(tokens):
                assert tokens == option["sliding_window"]
            case _:
                pass


OLD_KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_next": ({}, {"full_attention_interval": 4}),
    "gemma2": ({}, {}),
    "gemma3_text": ({}, {"sliding_window_pattern": 6}),
    "gpt_oss": ({}, {}),
    "cohere2": ({}, {"sliding_window_pattern": 4}),
    "llama4_text": ({}, {}),
    "qwen2": ({"use_sliding_window": True, "max_window_layers": 3}, {}),
}


@pytest.mark.parametrize("model_type", OLD_KEYS)
def test_older_files_without_layer_types_read_alike(model_type: str) -> None:
    arguments, older = OLD_KEYS[model_type]
    new = mapping[model_type](**arguments).to_dict()
    old = {k: v for k, v in new.items() if k not in ("layer_types", "_sliding_window_pattern")}
    assert model_layers({**old, **older}).layers == model_layers(new).layers


@pytest.mark.parametrize("model_type", CLASS_DEFAULTS)
def test_facts_left_out_of_files_are_the_defaults_of_their_class(model_type: str) -> None:
    config = mapping[model_type]()
    for key, value in CLASS_DEFAULTS[model_type].items():
        assert getattr(config, key) == value


def test_zamba2_keeps_the_tensors_that_transformers_keeps() -> None:
    torch = pytest.importorskip("torch")
    config = mapping["zamba2"](
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        n_mamba_heads=8,
        mamba_d_state=16,
        mamba_ngroups=2,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        vocab_size=100,
        intermediate_size=64,
        chunk_size=8,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    kept = model(torch.arange(7)[None], use_cache=True).past_key_values.layers
    layers = {layer.name: layer for layer in model_layers(config.to_dict()).layers}
    assert [f"model.layers.{i}.self_attn" in layers for i in range(3)] == [False, True, True]
    for i, theirs in enumerate(kept):
        state = layers[f"model.layers.{i}.mamba"]
        assert state.field("ssm").shape == tuple(theirs.recurrent_states[0].shape[1:])
        channels, taps = theirs.conv_states[0].shape[1:]
        assert state.field("conv").shape == (channels, taps - 1)
    for i in (1, 2):
        heads, _, dim = kept[i].keys.shape[1:]
        own = layers[f"model.layers.{i}.self_attn"]
        assert (own.heads.size, own.field("k").shape) == (heads, (dim,))


def test_falcon_h1_is_attention_and_mamba_in_every_layer() -> None:
    config = mapping["falcon_h1"]()
    layers = model_layers(config.to_dict()).layers
    assert len(layers) == 2 * config.num_hidden_layers
    assert oracle(config)[0] == ["hybrid"] * config.num_hidden_layers


def test_nemotron_h_blocks_are_those_of_transformers() -> None:
    config = mapping["nemotron_h"](hybrid_override_pattern="M-*EMM*")
    expected = [KINDS[kind] for kind in config.layer_types if kind in KINDS]
    assert [type(x.retention) for x in model_layers(config.to_dict()).layers] == expected


@pytest.mark.parametrize("model_type", ["whisper", "t5", "bart"])
def test_encoder_decoder_models_have_two_caches_in_every_decoder_layer(model_type: str) -> None:
    config = mapping[model_type]()
    layers = model_layers(config.to_dict()).layers
    decoder = config.get_text_config(decoder=True)
    own = getattr(decoder, "decoder_layers", None) or decoder.num_hidden_layers
    assert len(layers) == 2 * own
    assert isinstance(layers[1].retention, Encoder)


def test_v4_caches_follow_the_layer_types_of_transformers() -> None:
    config = mapping["deepseek_v4"]()
    names = [x.name for x in model_layers(config.to_dict()).layers]
    for i, kind in enumerate(config.layer_types):
        suffixes = {name.rsplit(".", 1)[1] for name in names if f"layers.{i}." in name}
        assert ("c4" in suffixes) == (kind == "compressed_sparse_attention")
        assert ("c128" in suffixes) == (kind == "heavily_compressed_attention")
        assert "sliding" in suffixes
