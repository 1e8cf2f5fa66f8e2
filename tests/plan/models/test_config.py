"""Where a model's facts come from, and what is wrong with them."""

import json
from pathlib import Path

import pytest

from kvstow.errors import ModelError
from kvstow.plan.models import load_model, model_layers
from kvstow.plan.spec import DType
from model_facts import LLAMA


def test_a_path_a_directory_and_a_dict_read_alike(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    expected = model_layers(LLAMA).layers
    assert model_layers(tmp_path).layers == expected
    assert model_layers(str(tmp_path)).layers == expected
    assert model_layers(tmp_path / "config.json").layers == expected
    assert model_layers(load_model(LLAMA)).layers == expected


def test_what_names_no_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty name was the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"without a name\n\nhint: "):
        load_model("")
    for wrong in (None, 3, ["llama-3.1-8b"]):
        with pytest.raises(ModelError, match=f"not {type(wrong).__name__}"):
            load_model(wrong)  # pyright: ignore[reportArgumentType]


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


def test_the_home_of_nobody_is_a_path_that_does_not_exist() -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        load_model("~nobody-at-all/config.json")


def test_a_directory_whose_name_is_no_text_gives_a_layout_that_can_be_written(
    tmp_path: Path,
) -> None:
    home = tmp_path / "model-\udcff"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(home).name == "model-?"
