"""What counts of a checkpoint: configuration, settings, code, tokenizer, and every tensor."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from checkpoints import CONFIG, checkpoint, safetensors
from kvstow.errors import ModelError
from kvstow.plan.checkpoint import (
    CACHE_NAME,
    MAX_CODE_FILES,
    SETTINGS,
    WHOLE_BYTES,
    checkpoint_name,
    weight_files,
    weights_digest,
)
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


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "qwen.tiktoken", "spiece.model", "tokenizer.model.v3", "source.spm"],
)
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


@pytest.mark.parametrize("place", PLACES)
def test_another_class_of_the_same_files_is_another_computation(tmp_path: Path, place: str):
    text = json.dumps(PLACES[place])
    folders = [tmp_path / name / "own" for name in "ab"]
    for folder, name in zip(folders, ("OwnModel", "OtherModel"), strict=True):
        with_code(folder, json.loads(text.replace("OwnModel", name)))
    differences = Identity.of(folders[0]).differences(Identity.of(folders[1]))
    (difference,) = (each for each in differences if each.startswith("config code "))
    assert "'modeling_own.OwnModel' in the source" in difference


@pytest.mark.parametrize("name", ["preprocessor_config.json", "tokenizer_config.json"])
def test_code_that_a_file_beside_the_configuration_names_counts(tmp_path: Path, name: str):
    folder = with_code(tmp_path, {})
    (folder / name).write_text(json.dumps({"auto_map": {"AutoImageProcessor": "a.Own"}}))
    before = Identity.of(folder)
    (folder / CODE[0]).write_text("scale = 2\n")
    (difference,) = before.differences(Identity.of(folder))
    assert difference.startswith(f"config file {CODE[0]} is ")


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


# ── every tensor ──────────────────────────────────────────────────────────────────────


def test_each_of_very_many_tensors_counts(tmp_path: Path):
    """More than there are samples, over several files, as experts are."""
    names = [f"layers.{n // 64}.mlp.experts.{n % 64}.down_proj.weight" for n in range(3 * 4096)]
    shards = [names[i::3] for i in range(3)]
    whole = [safetensors(dict.fromkeys(shard, b"\x01" * 64)) for shard in shards]
    for number, data in enumerate(whole):
        (tmp_path / f"model-{number}.safetensors").write_bytes(data)
    before = weights_digest(tmp_path)
    chooser = random.Random(1)
    for _ in range(6):
        number, at = chooser.randrange(3), 64 * chooser.randrange(4096) + chooser.randrange(64)
        data = bytearray(whole[number])
        data[at - 64 * 4096] ^= 1
        path = tmp_path / f"model-{number}.safetensors"
        path.write_bytes(data)
        assert weights_digest(tmp_path) != before
        path.write_bytes(whole[number])
    assert weights_digest(tmp_path) == before


@pytest.mark.parametrize("at", [0, 1, WHOLE_BYTES // 2, WHOLE_BYTES - 1])
def test_each_byte_of_a_small_tensor_counts(tmp_path: Path, at: int):
    many = {f"w{n}": bytes(WHOLE_BYTES) for n in range(64)}
    (tmp_path / "model.safetensors").write_bytes(safetensors(many))
    before = weights_digest(tmp_path)
    changed = bytearray(WHOLE_BYTES)
    changed[at] = 1
    (tmp_path / "model.safetensors").write_bytes(safetensors(many | {"w7": bytes(changed)}))
    assert weights_digest(tmp_path) != before


def with_tensors(folder: Path, **tensors: np.ndarray) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(
        {name.replace("__", "."): each for name, each in tensors.items()}, folder / "m.safetensors"
    )
    return folder


def test_one_token_of_an_embedding_that_was_changed_is_seen(tmp_path: Path):
    """As after training added tokens only, or repairing untrained ones."""
    weights = np.random.default_rng(1).random((4096, 64), np.float32)
    tuned = weights.copy()
    tuned[7] = 0.25
    for name in ("model__embed_tokens__weight", "transformer__wte__weight"):
        folders = tmp_path / name / "a" / "m", tmp_path / name / "b" / "m"
        ids = [
            Identity.of(with_tensors(folder, **{name: each, "model__q__weight": weights}))
            for folder, each in zip(folders, (weights, tuned), strict=True)
        ]
        assert ids[0].weights != ids[1].weights


def test_one_expert_of_a_fused_tensor_among_many_is_seen(tmp_path: Path):
    """Though its file's share of samples is one per tensor."""
    shape, size = [32, 64, 512], 32 * 64 * 512
    others = {f"w{n}": bytes(16) for n in range(20_000)}

    def digest(experts: bytes) -> str:
        data = safetensors({"experts": experts} | others, {"experts": shape})
        (tmp_path / "model.safetensors").write_bytes(data)
        return weights_digest(tmp_path)

    before = digest(bytes(size))
    for expert in (0, 7, 31):
        tuned = bytearray(size)
        tuned[expert * size // 32 : (expert + 1) * size // 32] = b"\1" * (size // 32)
        assert digest(bytes(tuned)) != before


# ── other formats ─────────────────────────────────────────────────────────────────────


def test_the_format_that_an_engine_loads_counts_and_is_named(tmp_path: Path):
    folder = checkpoint(tmp_path)
    before = Identity.of(folder)
    assert before.weights.startswith("safetensors:")
    torch.save({"w": torch.zeros(64)}, folder / "pytorch_model.bin")
    (folder / "model-Q4.gguf").write_bytes(b"GGUF")
    assert Identity.of(folder) == before
    told = Identity.of(folder, weight_files="*.bin")
    assert told.weights.startswith("bin:")
    (difference,) = before.differences(told)
    assert "'safetensors:" in difference
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert Identity.of(folder) == told
    (folder / "pytorch_model.bin").unlink()
    assert Identity.of(folder).weights.startswith("gguf:")


def test_the_index_counts_and_says_which_files_do(tmp_path: Path):
    folder = checkpoint(tmp_path)
    names = ["model-0.safetensors", "model-1.safetensors"]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    before = weights_digest(folder)
    (folder / "consolidated.safetensors").write_bytes(safetensors({"w": b"123"}))
    assert weights_digest(folder) == before
    assert [path.name for path in weight_files(folder)] == [*names, index.name]
    assert weights_digest(folder, "consolidated*.safetensors") != before
    index.write_text(json.dumps({"weight_map": {"a": names[1], "b": names[0]}}))
    assert weights_digest(folder) != before
    index.write_text("[]")
    with pytest.raises(ModelError, match="its files cannot be read"):
        weights_digest(folder)


def test_files_that_an_index_names_count_wherever_they_lie(tmp_path: Path):
    folder = checkpoint(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "model-0.safetensors", "b": "sub/b.safetensors"}})
    )
    (folder / "sub").mkdir()
    digests: set[str] = set()
    for data in (b"1", b"2"):
        (folder / "sub/b.safetensors").write_bytes(safetensors({"b": data * 64}))
        digests.add(weights_digest(folder))
    (folder / "adapter_model.safetensors").write_bytes(safetensors({"lora": b"3"}))
    digests.add(weights_digest(folder))
    assert len(digests) == 3


def test_the_index_of_another_format_counts(tmp_path: Path):
    torch.save({"w": torch.zeros(64)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"w": torch.ones(64)}, tmp_path / "pytorch_model-2.bin")
    digests: set[str] = set()
    for number in (1, 2):
        index = {"weight_map": {"w": f"pytorch_model-{number}.bin"}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        digests.add(weights_digest(tmp_path))
    assert len(digests) == 2


def test_of_several_gguf_models_in_a_folder_one_has_to_be_named(tmp_path: Path):
    """All of them are there for every engine, whichever it loads."""
    checkpoint(tmp_path, shards=0)
    for part in ("Q4-00001-of-00002", "Q4-00002-of-00002"):
        (tmp_path / f"m-{part}.gguf").write_bytes(part.encode())
    (tmp_path / "mmproj-f16.gguf").write_bytes(b"GGUF")
    assert Identity.of(tmp_path).weights.startswith("gguf:")
    (tmp_path / "m-Q8.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 models in GGUF files \(m-Q4, m-Q8\)"):
        Identity.of(tmp_path)
    q4, q8 = (Identity.of(tmp_path, weight_files=f"*{name}*.gguf") for name in ("Q4", "Q8"))
    assert q4.differences(q8)


def test_what_a_trainer_leaves_is_no_weight(tmp_path: Path):
    torch.save({"w": torch.zeros(64)}, tmp_path / "pytorch_model.bin")
    before = weights_digest(tmp_path)
    torch.save({"lr": 1e-4}, tmp_path / "training_args.bin")
    assert weights_digest(tmp_path) == before


@pytest.mark.parametrize("at", [0, 77_777, (1 << 23) + 5, (1 << 23) + 99_999])
@pytest.mark.parametrize("name", ["m.gguf", "pytorch_model.bin", "m.pt"])
def test_each_byte_of_another_format_counts(tmp_path: Path, name: str, at: int):
    data = bytearray((1 << 23) + 100_000)
    (tmp_path / name).write_bytes(data)
    before = weights_digest(tmp_path)
    data[at] ^= 1
    (tmp_path / name).write_bytes(data)
    assert weights_digest(tmp_path) != before


# ── the cache, and damage ─────────────────────────────────────────────────────────────


def test_the_digest_is_kept_beside_the_weights_and_not_trusted_after_a_change(tmp_path: Path):
    folder = checkpoint(tmp_path / "llama")
    first = Identity.of(folder)
    assert (folder / CACHE_NAME).is_file()
    cached = json.loads((folder / CACHE_NAME).read_text())
    (folder / CACHE_NAME).write_text(json.dumps(cached | {"weights": "kept"}))
    assert Identity.of(folder).weights == "kept"
    checkpoint(folder, seed=3)
    assert Identity.of(folder).weights not in ("kept", first.weights)
    (folder / CACHE_NAME).write_text("garbage")
    assert Identity.of(folder).weights not in ("kept", first.weights)


def test_weights_put_in_place_with_the_old_times_are_read_again(tmp_path: Path):
    """As `rsync -t`, `cp -p` and images with normalised times do."""
    checkpoint(tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    before, stat = Identity.of(tmp_path), file.stat()
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:start] + bytes(byte ^ 1 for byte in data[start:]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert Identity.of(tmp_path).weights != before.weights


def test_a_note_of_the_digest_that_is_none_is_not_used(tmp_path: Path):
    right = Identity.of(checkpoint(tmp_path))
    note = json.loads((tmp_path / CACHE_NAME).read_text())
    empty = json.dumps(note | {"weights": ""}).encode()
    for data in (b'"\x80"', b'{"x":' * 50_000, empty):
        (tmp_path / CACHE_NAME).write_bytes(data)
        assert Identity.of(tmp_path) == right


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        '{"a": []}',
        '{"a": {"data_offsets": [0]}}',
        '{"a": {"data_offsets": [0, 1e999]}}',
        '{"a": {"data_offsets": [8, 4]}}',
        '{"a": {"data_offsets": [-8, 4]}}',
        '{"a": {"data_offsets": [0, 65]}}',
        '{"a": {"data_offsets": [0, 33]}, "b": {"data_offsets": [32, 64]}}',
        '{"a": {"data_offsets": [0, 1000000000000000000000]}}',
        "[" * 50_000,
    ],
)
def test_weights_whose_header_is_none_are_refused(tmp_path: Path, header: str):
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(64)
    (checkpoint(tmp_path) / "model-0.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="header cannot be read"):
        Identity.of(tmp_path)
