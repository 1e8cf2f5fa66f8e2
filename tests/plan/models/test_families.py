"""Models whose type is not known."""

import pytest

from kvstow.errors import ModelError
from kvstow.plan.models import model_layers
from model_facts import LLAMA


def test_an_unknown_model_type_is_read_as_an_ordinary_decoder_with_a_note() -> None:
    model = model_layers({**LLAMA, "model_type": "foo"})
    assert model.layers == model_layers(LLAMA).layers
    assert model.notes == ("unknown model_type 'foo': read as an ordinary decoder",)


def test_a_missing_model_type_is_noted() -> None:
    model = model_layers({k: v for k, v in LLAMA.items() if k != "model_type"})
    assert model.notes == ("no model_type: read as an ordinary decoder",)


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
