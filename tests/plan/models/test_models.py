"""Reading a model: sources, the catalogue, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import KvstowError, ModelError
from kvstow.plan.models import Config, catalogue, load_model, model_layers
from kvstow.plan.models.catalogue import entries
from kvstow.plan.retention import Full, State, Window
from kvstow.plan.spec import DType

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}

WANTED = """
    llama-3.1-8b llama-3.1-70b llama-3.2-1b deepseek-r1-distill-qwen-32b deepseek-v2-lite
    mistral-7b-v0.1 mistral-7b-v0.2 mistral-small-24b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b
    qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-32b gpt-oss-20b gpt-oss-120b
    deepseek-v4-flash deepseek-v4-pro deepseek-v3 deepseek-v3.2 gemma-3-27b gemma-3-270m
    gemma-2-9b smollm2-135m qwen3-next-80b jamba-mini bamba-9b falcon-h1-0.5b nemotron-h-8b
    mamba2-2.7b kimi-k2 kimi-linear-48b minimax-text-01 llama-4-scout glm-4-9b phi-3-mini
    phi-4 whisper-large-v3 t5-large lfm2-350m qwen3-30b-a3b
"""


def test_the_catalogue_knows_more_than_forty_models_and_all_that_the_docs_name() -> None:
    assert len(catalogue()) > 40
    assert set(WANTED.split()) <= set(catalogue())


@pytest.mark.parametrize("name", catalogue())
def test_every_catalogue_model_says_where_its_facts_came_from(name: str) -> None:
    assert len(entries()[name]["source"]) > 20


@pytest.mark.parametrize("name", catalogue())
def test_every_catalogue_model_gives_layers_of_unique_names(name: str) -> None:
    model = model_layers(name)
    names = [layer.name for layer in model.layers]
    assert model.name == name
    assert names
    assert len(set(names)) == len(names)


def test_no_name_or_alias_means_two_models() -> None:
    names = [alias for name, entry in entries().items() for alias in (name, *entry["aliases"])]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() for name in names)


@pytest.mark.parametrize(
    "name",
    ["Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "LLAMA-3.1-8B-INSTRUCT", "llama-3.1-8b"],
)
def test_names_are_found_in_any_case_with_or_without_organisation(name: str) -> None:
    assert load_model(name).name == "llama-3.1-8b"


def test_an_unknown_name_is_refused_with_those_close_to_it() -> None:
    with pytest.raises(ModelError, match=r"'llama-3.1-9b'(?s:.*)hint: .*llama-3.1-8b"):
        load_model("llama-3.1-9b")


def test_a_name_like_nothing_is_sent_to_a_config_file() -> None:
    with pytest.raises(ModelError, match=r"hint: give the path of a config\.json"):
        load_model("@@@@")


@pytest.mark.parametrize("name", ["\0", "x" * 5000, ""])
def test_names_that_no_file_can_have_are_only_unknown(name: str) -> None:
    with pytest.raises(ModelError):
        load_model(name)


def test_a_path_a_directory_and_a_dict_read_alike(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    expected = model_layers(LLAMA).layers
    assert model_layers(tmp_path).layers == expected
    assert model_layers(str(tmp_path)).layers == expected
    assert model_layers(tmp_path / "config.json").layers == expected
    assert model_layers(load_model(LLAMA)).layers == expected


def test_a_model_from_a_directory_is_called_like_the_directory(tmp_path: Path) -> None:
    home = tmp_path / "my-model"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(home).name == "my-model"


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3", '"llama"', "null", "[" * 100_000, "\xff"])
def test_a_file_that_holds_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError):
        load_model(file)


def test_the_text_part_of_a_multimodal_model_is_merged_to_the_top() -> None:
    outer = {
        "model_type": "mistral3",
        "torch_dtype": "float16",
        "num_hidden_layers": 99,
        "text_config": {**LLAMA, "torch_dtype": None},
        "vision_config": {"num_hidden_layers": 24},
    }
    model = model_layers(outer)
    assert len(model.layers) == 4
    assert model.layers[0].field("k").dtype is DType.FLOAT16
    assert model.notes == ()


def test_a_text_part_nested_in_another_part_is_found() -> None:
    outer = {"model_type": "omni", "thinker_config": {"text_config": LLAMA}}
    assert model_layers(outer).layers == model_layers(LLAMA).layers


def test_a_text_part_that_is_no_object_is_refused() -> None:
    with pytest.raises(ModelError, match="text_config is 3"):
        load_model({"model_type": "x", "text_config": 3})


def test_a_dict_is_not_changed_by_reading_it() -> None:
    config = {"model_type": "gemma3", "text_config": dict(LLAMA)}
    before = json.dumps(config)
    model_layers(config)
    assert json.dumps(config) == before


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


def test_a_missing_dtype_is_noted_and_planned_as_bfloat16() -> None:
    model = model_layers({k: v for k, v in LLAMA.items() if k != "torch_dtype"})
    assert model.layers[0].field("k").dtype is DType.BFLOAT16
    assert model.notes == ("no dtype in the configuration: planned as bfloat16",)


def test_the_newer_key_for_the_dtype_is_read_too() -> None:
    config = {**LLAMA, "torch_dtype": None, "dtype": "torch.float32"}
    assert model_layers(config).layers[0].field("v").dtype is DType.FLOAT32


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads"])
def test_a_missing_fact_is_refused_by_name(key: str) -> None:
    with pytest.raises(ModelError, match=f"no '{key}'"):
        model_layers({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"]
)
@pytest.mark.parametrize("value", [0, -1, True, False, 2.0, "4", [4], {"a": 1}])
def test_a_count_that_is_not_a_whole_positive_number_is_refused(key: str, value: object) -> None:
    with pytest.raises(ModelError) as error:
        model_layers({**LLAMA, key: value})
    assert f"{key} is {value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than 10000"),
        ({"head_dim": 2**40 + 1}, "head_dim is 1099511627777, more than 1099511627776"),
        ({"num_key_value_heads": 16}, "8 attention heads cannot share 16 kv heads"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 kv heads"),
        ({"hidden_size": 65}, "hidden_size 65 is not divisible by 8"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers, .* is 4"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', not a list"),
        ({"layer_types": [1, 2, 3, 4]}, "layer_types holds 1, not a string"),
        ({"layer_types": ["sliding_attention"] * 4}, "no 'sliding_window'"),
        ({"layer_types": ["chunked_attention"] * 4}, "no 'attention_chunk_size'"),
        ({"layer_types": ["dragon"] * 4}, "'dragon'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": "big"}, "sliding_window is 'big'"),
        ({"use_sliding_window": "no"}, "use_sliding_window is 'no'"),
        ({"torch_dtype": "float7"}, "torch_dtype is 'float7'"),
        ({"torch_dtype": 16}, "torch_dtype is 16"),
        ({"model_type": 5}, "model_type is 5"),
    ],
)
def test_contradictory_facts_are_refused_with_both_values(
    changes: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        model_layers({**LLAMA, **changes})


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "16"])
@pytest.mark.parametrize("key", ["block_tokens", "checkpoint_tokens", "tp", "pp"])
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


def test_recurrent_layers_are_checkpointed_at_the_distance_asked_for() -> None:
    model = model_layers("mamba2-2.7b", checkpoint_tokens=1024, block_tokens=32)
    assert {layer.block_tokens for layer in model.layers} == {1024}


def test_a_layer_may_have_any_name_and_order_is_the_models() -> None:
    names = [layer.name for layer in model_layers("llama-3.1-8b").layers]
    assert names.index("model.layers.2.self_attn") < names.index("model.layers.10.self_attn")


def test_a_config_is_printed_without_its_facts() -> None:
    assert repr(Config(name="x", facts=LLAMA)) == "Config(name='x')"


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


def test_full_and_window_layers_of_a_model_keep_the_same_pages() -> None:
    model = model_layers("gpt-oss-20b")
    pages = {(layer.retention, layer.page_bytes) for layer in model.layers}
    assert pages == {(Full(), 32_768), (Window(128), 32_768)}
