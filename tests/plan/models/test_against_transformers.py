"""Layers as transformers sees them: its configuration classes are the oracle."""

import pytest

from kvstow.plan.models import model_layers
from kvstow.plan.models.config import CLASS_DEFAULTS
from kvstow.plan.retention import Encoder, Full, State

transformers = pytest.importorskip("transformers")
mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("model_type", ["qwen3_next", "gpt_oss", "llama4_text"])
def test_older_files_without_layer_types_read_alike(model_type: str) -> None:
    """Those with a window are among every family's."""
    new = mapping[model_type]().to_dict()
    old = {**new, "full_attention_interval": 4}
    del old["layer_types"]
    assert model_layers(old).layers == model_layers(new).layers


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


def test_nemotron_h_blocks_are_those_of_transformers() -> None:
    config = mapping["nemotron_h"](hybrid_override_pattern="M-*EMM*")
    kinds = {"mamba": State, "linear_attention": State, "attention": Full, "full_attention": Full}
    expected = [kinds[kind] for kind in config.layer_types if kind in kinds]
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
