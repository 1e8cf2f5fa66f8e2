"""What counts of a checkpoint beside its weights: configuration, settings, code, tokenizer."""

import json
import os
from pathlib import Path

import pytest

from checkpoints import checkpoint
from kvstow.errors import ModelError
from kvstow.plan.checkpoint import MAX_CODE_FILES, SETTINGS, checkpoint_name
from kvstow.plan.identity import Identity


def test_a_folder_without_weights_or_configuration_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"config\.json: .*: No such file or directory\n\nhint: "):
        Identity.of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="unverified"):
        Identity.of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="header"):
        Identity.of(tmp_path)


def test_a_configuration_that_is_no_file_is_refused_at_once(tmp_path: Path):
    (checkpoint(tmp_path) / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match="no ordinary file"):
        Identity.of(tmp_path)


def test_mistrals_own_configuration_stands_in_for_the_other(tmp_path: Path):
    folders = [checkpoint(tmp_path / name / "own") for name in "ab"]
    for folder, theta in zip(folders, (1e4, 1e6), strict=True):
        (folder / "config.json").unlink()
        (folder / "params.json").write_text(json.dumps({"rope_theta": theta}))
    (difference,) = Identity.of(folders[0]).differences(Identity.of(folders[1]))
    assert difference.startswith("config file params.json is ")


def test_an_adapter_counts_by_its_bytes(tmp_path: Path):
    folder = checkpoint(tmp_path / "llama")
    one = Identity.of(folder, adapter=checkpoint(tmp_path / "a" / "lora", shards=1))
    other = Identity.of(folder, adapter=checkpoint(tmp_path / "b" / "lora", shards=1, seed=5))
    assert one.adapter.startswith("lora:")
    assert one.differences(other)


def test_a_hub_snapshot_has_its_models_name(tmp_path: Path):
    assert checkpoint_name(tmp_path / "models--org--name-7B" / "snapshots" / "abc") == "org/name-7B"
    assert checkpoint_name(tmp_path / "my-model") == "my-model"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_file_that_decides_what_is_computed_is_named_where_it_differs(tmp_path: Path, name: str):
    folder = checkpoint(tmp_path)
    without = Identity.of(folder)
    (folder / name).write_text('{"group_size": 64}')
    one = Identity.of(folder)
    (folder / name).write_text('{"group_size": 128}')
    other = Identity.of(folder)
    for before, after in ((without, one), (one, other)):
        (difference,) = before.differences(after)
        assert difference.startswith(f"config file {name} is ")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "qwen.tiktoken", "spiece.model"])
def test_every_file_of_the_tokenizer_counts(tmp_path: Path, name: str):
    folder = checkpoint(tmp_path)
    before = Identity.of(folder)
    (folder / name).write_text('{"add_bos_token": true}')
    (difference,) = before.differences(Identity.of(folder))
    assert difference.startswith("tokenizer is ")


def test_how_a_chat_becomes_text_does_not_count(tmp_path: Path):
    folder = checkpoint(tmp_path)
    identities: list[Identity] = []
    for template in ("{{ a }}", "{{ b }}"):
        fields = {"chat_template": template, "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
        identities.append(Identity.of(folder))
    assert identities[0] == identities[1]


# ── modelling code ────────────────────────────────────────────────────────────────────

AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnModel",
    "AutoTokenizer": ["tokenization_own.OwnTokenizer", None],
}
PLACES = {
    "top": {"auto_map": AUTO_MAP},
    "text_config": {"text_config": {"auto_map": AUTO_MAP}},
    "llm_config": {"llm_config": {"inner": [{"auto_map": AUTO_MAP}]}},
}
CODE = (
    "configuration_own.py",
    "modeling_own.py",
    "imported_absolutely.py",
    "package/__init__.py",
    "package/deep/norm.py",
)


def with_code(folder: Path, config: dict[str, object]) -> Path:
    checkpoint(folder, config=config)
    for name in CODE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("scale = 1\n")
    return folder


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CODE)
def test_every_python_file_counts_and_is_named_wherever_code_is_asked_for(
    tmp_path: Path, place: str, name: str
):
    folder = with_code(tmp_path, PLACES[place])
    before = Identity.of(folder)
    assert before == Identity.of(folder)
    (folder / name).write_text("scale = 2\n")
    (difference,) = before.differences(Identity.of(folder))
    assert difference.startswith(f"config file {name} is ")


def test_code_behind_a_link_counts(tmp_path: Path):
    folder = with_code(tmp_path / "own", PLACES["top"])
    (tmp_path / "elsewhere").mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    before = Identity.of(folder)
    (tmp_path / "elsewhere" / "norm.py").write_text("scale = 2\n")
    assert "linked/norm.py" in Identity.of(folder).differences(before)[0]


def test_code_that_the_engine_does_not_run_does_not_count(tmp_path: Path):
    folder = with_code(tmp_path, PLACES["top"])
    before, trusted = Identity.of(folder, trust_remote_code=False), Identity.of(folder)
    (folder / CODE[0]).write_text("scale = 2\n")
    assert Identity.of(folder, trust_remote_code=False) == before
    assert Identity.of(folder) != trusted


def test_code_in_another_repository_counts_by_its_name(tmp_path: Path):
    maps = [{"AutoModelForCausalLM": f"{who}/model--modeling.Model"} for who in ("one", "other")]
    folders = [tmp_path / name / "own" for name in "ab"]
    one, other = (
        Identity.of(checkpoint(folder, config={"text_config": {"auto_map": each}}))
        for folder, each in zip(folders, maps, strict=True)
    )
    words = " ".join(one.differences(other))
    assert "one/model--modeling.Model" in words
    assert "other/model--modeling.Model" in words


@pytest.mark.parametrize("auto_map", [None, [], "", {"AutoModel": None}, {"AutoModel": [3, {}]}])
def test_an_auto_map_that_names_nothing_is_no_code(tmp_path: Path, auto_map: object):
    folder = with_code(tmp_path, {"auto_map": auto_map})
    before = Identity.of(folder)
    (folder / CODE[0]).write_text("scale = 2\n")
    assert Identity.of(folder) == before


def test_a_folder_full_of_other_code_is_refused(tmp_path: Path):
    folder = with_code(tmp_path, PLACES["top"])
    for number in range(MAX_CODE_FILES):
        (folder / f"f{number}.py").touch()
    with pytest.raises(ModelError, match="Python files below"):
        Identity.of(folder)
