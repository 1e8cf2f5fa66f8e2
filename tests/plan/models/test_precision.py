"""Tokens per block, cache dtypes and checkpoints: what the operator chooses."""

import pytest

from kvstow.errors import ModelError
from kvstow.plan.models import model_layers
from kvstow.plan.models.precision import precision
from kvstow.plan.retention import State
from kvstow.plan.spec import DType
from model_facts import LLAMA


def test_a_missing_dtype_is_noted_and_planned_as_bfloat16() -> None:
    model = model_layers({k: v for k, v in LLAMA.items() if k != "torch_dtype"})
    assert model.layers[0].field("k").dtype is DType.BFLOAT16
    assert model.notes == ("no dtype in the configuration: planned as bfloat16",)


def test_the_newer_key_for_the_dtype_is_read_too() -> None:
    config = {**LLAMA, "torch_dtype": None, "dtype": "torch.float32"}
    assert model_layers(config).layers[0].field("v").dtype is DType.FLOAT32


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "16"])
@pytest.mark.parametrize("key", ["block_tokens", "tp", "pp"])
def test_a_choice_that_is_not_a_whole_positive_number_is_refused(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"{key} is {value!r}"):
        model_layers(LLAMA, **{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [8, True, "fp12", ""])
def test_a_cache_dtype_that_is_no_known_name_is_refused(value: object) -> None:
    with pytest.raises(ModelError, match="dtype"):
        model_layers(LLAMA, kv_dtype=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "bits"), [("auto", 16), ("AUTO", 16), ("fp8", 8), ("fp32", 32)])
def test_the_cache_dtype_replaces_the_models_own_unless_it_is_auto(name: str, bits: int) -> None:
    assert model_layers(LLAMA, kv_dtype=name).layers[0].field("k").dtype.bits == bits


def test_recurrent_pages_change_neither_with_tokens_per_block_nor_with_the_cache_dtype() -> None:
    def states(**choices: object) -> list[int]:
        model = model_layers("qwen3-next-80b", **choices)  # type: ignore[arg-type]
        return [x.page_bytes for x in model.layers if isinstance(x.retention, State)]

    assert states() == states(block_tokens=544) == states(kv_dtype="fp8") == [1_097_728] * 36


def test_recurrent_layers_are_checkpointed_at_a_distance_of_their_own() -> None:
    model = model_layers("mamba2-2.7b", block_tokens=32)
    assert {layer.block_tokens for layer in model.layers} == {512}


def test_an_unknown_element_type_is_refused_with_those_close_to_it() -> None:
    with pytest.raises(ModelError, match=r"'fp9'(?s:.*)hint: one of .*fp8"):
        precision("fp9")
