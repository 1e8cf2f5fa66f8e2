"""From a configuration to the layers of one rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import KvstowError, ModelError
from kvstow.plan.models import catalogue, model_layers
from kvstow.plan.models.catalogue import entries
from model_facts import LLAMA

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


KEYS = sorted({key for entry in entries().values() for key in entry["config"]})


@given(st.sampled_from(catalogue()), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_a_real_config_with_damaged_values_gives_layers_or_one_of_our_errors(
    name: str, damage: dict[str, object]
) -> None:
    try:
        model = model_layers({**entries()[name]["config"], **damage})
    except KvstowError:
        return
    assert all(layer.page_bytes > 0 for layer in model.layers)


def test_an_unknown_model_type_is_read_as_an_ordinary_decoder_with_a_note() -> None:
    model = model_layers({**LLAMA, "model_type": "foo"})
    assert model.layers == model_layers(LLAMA).layers
    assert model.notes == ("unknown model_type 'foo': read as an ordinary decoder",)


def test_an_unknown_model_with_latents_is_read_as_such_with_a_note() -> None:
    model = model_layers({**LLAMA, "model_type": "foo", "kv_lora_rank": 32, "qk_rope_head_dim": 8})
    assert model.layers[0].cell_bytes == (32 + 8) * 2
    assert "latent attention" in model.notes[0]


@pytest.mark.parametrize(
    "key", ["mamba_d_state", "linear_num_value_heads", "num_kv_shared_layers", "attn_config"]
)
def test_an_unknown_model_that_is_visibly_not_ordinary_is_refused(key: str) -> None:
    with pytest.raises(ModelError, match=f"'foo', and {key} says"):
        model_layers({**LLAMA, "model_type": "foo", key: 16})


def test_an_unknown_model_with_layer_types_of_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match="'rwkv'"):
        model_layers({**LLAMA, "model_type": "foo", "layer_types": ["rwkv"] * 4})
