"""Identities: equal where the computation is, and every difference in words."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvstow.errors import ManifestError, ModelError, SpecError
from kvstow.plan.checkpoint import CACHE_NAME, checkpoint_name
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity, config_fields
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import decode, encode, fingerprint
from kvstow.plan.pack import packed
from kvstow.route.compare import differences
from planning import attention

CONFIG = {
    "model_type": "llama",
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "sliding_window": None,
    "transformers_version": "5.22",
    "torch_dtype": "bfloat16",
}


def simple_layout() -> Layout:
    return packed(grouped([attention("layers.0")]), num_slabs=4)


def checkpoint(
    folder: Path, *, seed: int = 1, shards: int = 2, config: dict[str, object] | None = None
) -> Path:
    """A folder with real safetensors files, written by hand as their format says."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (folder / "tokenizer.json").write_text('{"model": "words"}')
    random = np.random.default_rng(seed)
    for shard in range(shards):
        names = [f"layers.{shard}.{name}" for name in ("q", "k", "v")]
        header = {
            name: {"dtype": "F32", "shape": [1024], "data_offsets": [i * 4096, (i + 1) * 4096]}
            for i, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        body = random.integers(0, 256, 3 * 4096, dtype=np.uint8).tobytes()
        data = len(text).to_bytes(8, "little") + text + body
        (folder / f"model-{shard}.safetensors").write_bytes(data)
    return folder


def test_one_checkpoint_in_two_places_is_one_identity(tmp_path: Path):
    one = Identity.of(checkpoint(tmp_path / "here" / "llama"))
    other = Identity.of(checkpoint(tmp_path / "there" / "llama"))
    assert one == other
    assert one.digest == other.digest
    assert one.differences(other) == ()
    assert one.is_verified


def test_other_weights_of_the_same_shape_are_another_identity(tmp_path: Path):
    one = Identity.of(checkpoint(tmp_path / "a" / "llama"))
    other = Identity.of(checkpoint(tmp_path / "b" / "llama", seed=2))
    (found,) = one.differences(other)
    assert one.weights in found
    assert other.weights in found
    assert one.digest != other.digest


def test_a_change_inside_any_one_tensor_is_seen(tmp_path: Path):
    folder = checkpoint(tmp_path / "llama")
    before = Identity.of(folder)
    path = folder / "model-1.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) - 2048] ^= 1  # the middle of the last tensor
    path.write_bytes(data)
    assert Identity.of(folder).weights != before.weights


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500000.0},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"sliding_window": 4096},
        {"attention_chunk_size": None},  # none, where no field means the default of its class
        {"torch_dtype": "float16"},
    ],
)
def test_a_field_that_changes_cached_bytes_is_a_difference_with_both_values(
    tmp_path: Path, change: dict[str, object]
):
    one = Identity.of(checkpoint(tmp_path / "a" / "llama"))
    other = Identity.of(checkpoint(tmp_path / "b" / "llama", config=change))
    (found,) = one.differences(other)
    name = next(iter(change))
    assert found.startswith(f"config {name}")
    assert " in the source, " in found


def test_fields_without_effect_on_the_cache_do_not_count():
    plain = config_fields(CONFIG)
    assert plain == config_fields(CONFIG | {"transformers_version": "9", "use_cache": False})
    assert ("rope_scaling.factor", "4.0") in plain


@pytest.mark.parametrize(
    "change",
    [
        {"kv_dtype": "fp8_e5m2"},
        {"interior": "cpu-transposed"},
        {"adapter": "lora-7"},
        {"salt": "tenant-a"},
        {"tokenizer": "another"},
        {"model": "another"},
    ],
)
def test_every_field_of_an_identity_counts(change: dict[str, str]):
    one = Identity(model="m", weights="aa", kv_dtype="fp8_e4m3")
    other = replace(one, **change)
    assert len(one.differences(other)) == 1
    assert one.digest != other.digest


def test_an_unverified_identity_never_matches_a_verified_one():
    verified = Identity(model="m", weights="aa")
    unverified = Identity.unverified("a test", model="m")
    assert any("unverified" in text for text in verified.differences(unverified))
    assert unverified.differences(Identity.unverified("another reason", model="m")) == ()
    assert unverified.differences(Identity.unverified("a test", model="n"))
    assert not unverified.is_verified


def test_an_identity_says_either_its_weights_or_why_not():
    with pytest.raises(SpecError, match="hint: pass identity="):
        Identity(model="m")
    with pytest.raises(SpecError):
        Identity(model="m", weights="aa", unverified_because="but")
    with pytest.raises(SpecError, match="sorted"):
        Identity(model="m", weights="aa", config=(("b", "1"), ("a", "1")))


def test_tensors_in_memory_identify_a_model_in_any_order():
    tensors = [("a", "f32 [2]", b"12345678"), ("b", "f32 [2]", b"87654321")]
    one = Identity.of_tensors("m", CONFIG, tensors)
    assert one == Identity.of_tensors("m", CONFIG, reversed(tensors))
    changed = [tensors[0], ("b", "f32 [2]", b"87654320")]
    assert one.differences(Identity.of_tensors("m", CONFIG, changed))
    with pytest.raises(ModelError):
        Identity.of_tensors("m", CONFIG, [])


def test_a_folder_without_weights_or_configuration_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"config\.json: .*: No such file or directory\n\nhint: "):
        Identity.of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="unverified"):
        Identity.of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="header"):
        Identity.of(tmp_path)


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


def test_an_adapter_counts_by_its_bytes(tmp_path: Path):
    folder = checkpoint(tmp_path / "llama")
    one = Identity.of(folder, adapter=checkpoint(tmp_path / "a" / "lora", shards=1))
    other = Identity.of(folder, adapter=checkpoint(tmp_path / "b" / "lora", shards=1, seed=5))
    assert one.adapter.startswith("lora:")
    assert one.differences(other)


def test_a_hub_snapshot_has_its_models_name(tmp_path: Path):
    assert checkpoint_name(tmp_path / "models--org--name-7B" / "snapshots" / "abc") == "org/name-7B"
    assert checkpoint_name(tmp_path / "my-model") == "my-model"


def test_an_identity_is_part_of_manifest_and_fingerprint():
    layout = simple_layout()
    one = layout.identified(Identity(model="m", weights="aa", config=(("rope_theta", "1"),)))
    other = layout.identified(Identity(model="m", weights="bb", config=(("rope_theta", "1"),)))
    assert json.loads(encode(layout))["kvstow"] == 1
    assert json.loads(encode(one))["kvstow"] == 2
    assert decode(encode(one)) == one
    assert len({fingerprint(x) for x in (layout, one, other)}) == 3
    assert differences(one, one) == ()
    assert any("'aa' in the source, 'bb'" in text for text in differences(one, other))
    assert any("not known" in text for text in differences(one, layout))


def test_versions_of_the_manifest_say_whether_there_is_an_identity():
    plain = json.loads(encode(simple_layout().identified(Identity.unverified("a test"))))
    for broken in (plain | {"kvstow": 1}, {k: v for k, v in plain.items() if k != "identity"}):
        with pytest.raises(ManifestError, match="identity"):
            decode(json.dumps(broken).encode())
    nothing_said = plain["identity"] | {"unverified_because": ""}
    with pytest.raises(ManifestError, match="spec"):
        decode(json.dumps(plain | {"identity": nothing_said}).encode())


def test_text_that_is_no_unicode_is_refused():
    data = encode(simple_layout()).replace(b'"model":"', b'"model":"\\ud800')
    with pytest.raises(ManifestError, match="syntax"):
        decode(data)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        '{"a": []}',
        '{"a": {"data_offsets": [0]}}',
        '{"a": {"data_offsets": [0, 1e999]}}',
        '{"a": {"data_offsets": [8, 4]}}',
        '{"a": {"data_offsets": [-8, 4]}}',
        '{"a": {"data_offsets": [0, 1000000000000000000000]}}',
        "[" * 50_000,
    ],
)
def test_weights_whose_header_is_none_are_refused(tmp_path: Path, header: str):
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(64)
    (checkpoint(tmp_path) / "model-0.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="header cannot be read"):
        Identity.of(tmp_path)


def test_a_note_of_the_digest_that_is_none_is_not_used(tmp_path: Path):
    right = Identity.of(checkpoint(tmp_path))
    known = json.loads((tmp_path / CACHE_NAME).read_text())
    empty = json.dumps(known | {"weights": ""}).encode()
    for note in (b'"\x80"', b'{"x":' * 50_000, empty):
        (tmp_path / CACHE_NAME).write_bytes(note)
        assert Identity.of(tmp_path) == right


def test_a_configuration_that_cannot_be_written_down_is_refused(tmp_path: Path):
    checkpoint(tmp_path, config={"rope_type": "\ud800"})
    with pytest.raises(SpecError, match="no Unicode"):
        Identity.of(tmp_path)
    checkpoint(tmp_path, config={"rope_type": "\ud800" * 300})
    with pytest.raises(ModelError, match="cannot be compared"):
        Identity.of(tmp_path)


def test_a_configuration_that_is_no_file_is_refused_at_once(tmp_path: Path):
    (checkpoint(tmp_path) / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match="no ordinary file"):
        Identity.of(tmp_path)


# ── modelling code ────────────────────────────────────────────────────────────────────

AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnModel",
    "AutoTokenizer": ["tokenization_own.OwnTokenizer", None],
}
OWN_CODE = {
    "configuration_own.py": "class OwnConfig: ...",
    "modeling_own.py": "from .rope import turned\nfrom . import parts\nfrom .sub.norm import Norm",
    "rope.py": "from .sub import scale\n",
    "parts.py": "import torch\n",
    "sub/__init__.py": "scale = 1\n",
    "sub/norm.py": "from ..deep import depth\n",
    "deep.py": "depth = 1\n",
    "tokenization_own.py": "class OwnTokenizer: ...",
    "unused.py": "",
}
COUNTED = set(OWN_CODE) - {"tokenization_own.py", "unused.py"}


def with_code(folder: Path, **changed: str) -> Path:
    checkpoint(folder, config={"auto_map": AUTO_MAP})
    for name, source in (OWN_CODE | {k.replace("__", "."): v for k, v in changed.items()}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    return folder


def test_equal_weights_with_other_modelling_code_are_another_identity_that_names_the_file(tmp_path):
    one = Identity.of(with_code(tmp_path / "a" / "own"))
    other = Identity.of(with_code(tmp_path / "b" / "own", rope__py="turned = 2"))
    assert any("modelling_code.rope.py" in each for each in one.differences(other))
    assert one == Identity.of(with_code(tmp_path / "c" / "own"))


@pytest.mark.parametrize("name", OWN_CODE)
def test_code_counts_where_the_model_imports_it_and_nowhere_else(tmp_path: Path, name: str):
    one = Identity.of(with_code(tmp_path / "a" / "own"))
    folder = with_code(tmp_path / "b" / "own")
    (folder / name).write_text(OWN_CODE[name] + "\n# another line\n")
    found = one.differences(Identity.of(folder))
    assert bool(found) == (name in COUNTED)
    assert all(f"modelling_code.{name} " in each for each in found)


def test_code_that_the_engine_does_not_run_does_not_count(tmp_path: Path):
    plain = Identity.of(checkpoint(tmp_path / "a" / "own"))
    own = with_code(tmp_path / "b" / "own")
    assert Identity.of(own, trust_remote_code=False) == plain
    assert Identity.of(own) != plain


def test_code_in_another_repository_counts_by_its_name(tmp_path: Path):
    maps = [{"AutoModelForCausalLM": f"{who}/model--modeling.Model"} for who in ("one", "other")]
    folders = [tmp_path / name / "own" for name in "ab"]
    one, other = (
        Identity.of(checkpoint(folder, config={"auto_map": each}))
        for folder, each in zip(folders, maps, strict=True)
    )
    (found,) = one.differences(other)
    assert "one/model--modeling.Model" in found
    assert "other/model--modeling.Model" in found


@pytest.mark.parametrize("auto_map", [None, [], "x", {"AutoModel": None}, {"AutoModel": [3, {}]}])
def test_an_auto_map_that_names_no_file_is_no_code(tmp_path: Path, auto_map: object):
    plain = Identity.of(checkpoint(tmp_path / "a" / "own"))
    assert plain == Identity.of(checkpoint(tmp_path / "b" / "own", config={"auto_map": auto_map}))


# ── where weights are looked at ───────────────────────────────────────────────────────


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


def test_one_expert_of_a_fused_tensor_that_was_changed_is_seen(tmp_path: Path):
    experts = np.random.default_rng(1).random((32, 64, 64), np.float32)
    whole = Identity.of(with_tensors(tmp_path / "whole" / "m", experts=experts))
    for expert in range(32):
        tuned = experts.copy()
        tuned[expert] += 1
        folder = with_tensors(tmp_path / str(expert) / "m", experts=tuned)
        assert Identity.of(folder).weights != whole.weights


def test_embeddings_that_overlap_are_not_read_again_and_again(tmp_path: Path):
    header = {
        f"embed{i}.weight": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}
        for i in range(20_000)  # 20 GB, if each were read
    }
    text = json.dumps(header).encode()
    checkpoint(tmp_path, shards=0)
    data = len(text).to_bytes(8, "little") + text + bytes(1 << 20)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert Identity.of(tmp_path).is_verified
