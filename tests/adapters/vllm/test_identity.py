"""Which computation fills an engine's cache: checkpoint, settings, weights that change."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstow.adapters.vllm.identity import EngineWeights, identity_of
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.errors import ModelError
from kvstow.plan.identity import Identity

CHECKPOINT = Identity(model="m", weights="0123", config=(("run.dtype", "float32"), ("z", "1")))


@pytest.fixture
def pair() -> tuple[EngineWeights, EngineWeights]:
    """Of two engines that were started with the same checkpoint."""
    return EngineWeights(CHECKPOINT), EngineWeights(CHECKPOINT)


def test_weights_are_the_checkpoints_until_they_change(pair: tuple[EngineWeights, EngineWeights]):
    one, other = pair
    assert one.identity.digest == other.identity.digest == CHECKPOINT.digest
    assert not one.have_changed
    one.change()
    assert one.have_changed


def test_changed_weights_are_nobody_elses(pair: tuple[EngineWeights, EngineWeights]):
    one, other = pair
    seen = {CHECKPOINT.digest}
    for weights in (one, other, one):
        weights.change()
        seen.add(weights.identity.digest)
    assert len(seen) == 4


def test_a_name_makes_them_equal_whatever_each_has_been_through(
    pair: tuple[EngineWeights, EngineWeights],
):
    one, other = pair
    one.name("1")
    one.mark_used()
    for weights in pair:
        weights.change()
        weights.name("2")
    assert one.identity.digest == other.identity.digest != CHECKPOINT.digest
    assert one.identity.differences(other.identity) == ()


@pytest.mark.parametrize("name", ["", "default", "0123", "\ud800", "x" * 5000])
def test_any_text_is_a_name_and_different_ones_differ(
    pair: tuple[EngineWeights, EngineWeights], name: str
):
    one, other = pair
    one.name(name)
    other.name(name + "1")
    assert len({one.identity.digest, other.identity.digest, CHECKPOINT.digest}) == 3
    other.name(name)
    assert one.identity.digest == other.identity.digest


def test_engines_of_different_checkpoints_differ_under_the_same_name():
    one = EngineWeights(CHECKPOINT)
    other = EngineWeights(Identity(model="m", weights="4567", config=CHECKPOINT.config))
    one.name("1")
    other.name("1")
    assert one.identity.digest != other.identity.digest


def test_a_name_under_which_nothing_was_computed_may_be_given_again(
    pair: tuple[EngineWeights, EngineWeights],
):
    """As for a model and its draft, one after the other."""
    one, other = pair
    for weights in (one, other, one):
        weights.name("1")
    assert one.identity.digest == other.identity.digest


def test_a_name_under_which_something_was_computed_is_not_taken_again(
    pair: tuple[EngineWeights, EngineWeights], caplog: pytest.LogCaptureFixture
):
    one, other = pair
    for weights in pair:
        weights.name("1")
        weights.mark_used()
    one.name("1")
    assert one.identity.digest != other.identity.digest
    assert "a new name for every change" in caplog.text
    one.name("2")
    one.name("1")
    assert one.identity.digest != other.identity.digest


# ── checkpoints and settings ──────────────────────────────────────────────────────────────


def checkpoint(folder: Path, *, byte: int = 0, **fields: object) -> Path:
    """A folder with a configuration and one tensor."""
    folder.mkdir()
    config = {"model_type": "llama", "rope_theta": 10000.0, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    head = json.dumps({"w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}).encode()
    data = len(head).to_bytes(8, "little") + head + bytes([byte]) * 256
    (folder / "model.safetensors").write_bytes(data)
    return folder


def engine(model: Path, **changed: object) -> SimpleNamespace:
    """What an identity is made of, as vLLM holds it."""
    given: dict[str, Any] = {
        "cache": "auto",
        "device": "cuda",
        "load": "auto",
        "window": None,
        "quantization": None,
        **changed,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            dtype=torch.bfloat16,
            quantization=given["quantization"],
            hf_overrides=given.get("overrides", {}),
            hf_config_path=given.get("config_path"),
            hf_config=SimpleNamespace(to_dict=lambda: {"rms_norm_eps": 1e-3}),
            hf_text_config=SimpleNamespace(
                rope_theta=10000.0,
                sliding_window=given["window"],
                rope_parameters=given.get("rope"),
            ),
            max_model_len=given.get("longest", 4096),
            quantization_config=given.get("online"),
            model_class_overrides=given.get("classes", {}),
            multimodal_config=SimpleNamespace(mm_processor_kwargs=given.get("images")),
        ),
        cache_config=SimpleNamespace(
            cache_dtype=given["cache"],
            calculate_kv_scales=given.get("scales", False),
            mamba_ssm_cache_dtype=given.get("states", "auto"),
        ),
        device_config=SimpleNamespace(device_type=given["device"]),
        load_config=SimpleNamespace(load_format=given["load"]),
    )


NO_OPTIONS = ConnectorOptions()


def test_copies_of_a_checkpoint_are_the_same_computation(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    found = [
        identity_of(engine(checkpoint(folder / "m")), NO_OPTIONS)
        for folder in (tmp_path, tmp_path / "elsewhere")
    ]
    assert found[0] == found[1]
    assert found[0].is_verified
    assert (found[0].model, found[0].kv_dtype) == ("m", "bfloat16")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cache": "fp8_e4m3"}, "cache dtype"),
        ({"device": "cpu"}, "page interior"),
        ({"window": 512}, "sliding_window"),
        ({"quantization": "fp8"}, "quantization"),
        ({"overrides": {"num_experts_per_tok": 1}}, "num_experts_per_tok"),
        ({"config_path": "/elsewhere"}, "rms_norm_eps"),
        ({"states": "float16"}, "mamba_ssm_cache_dtype"),
        ({"online": {"linear": "fp8"}}, "quantization_config"),
        ({"classes": {"LlamaForCausalLM": "Other"}}, "model_class_overrides"),
        ({"images": {"do_rescale": False}}, "mm_processor_kwargs"),
    ],
)
def test_engines_that_compute_otherwise_differ_in_words(
    tmp_path: Path, change: dict[str, object], says: str
):
    folder = checkpoint(tmp_path / "m")
    ours = identity_of(engine(folder), NO_OPTIONS)
    theirs = identity_of(engine(folder, **change), NO_OPTIONS)
    assert any(says in each for each in ours.differences(theirs))


@pytest.mark.parametrize(
    "change", [{"quantization": "fp8"}, {"overrides": {"num_experts_per_tok": 1}}]
)
def test_settings_count_though_nobody_looks_at_the_weights(
    tmp_path: Path, change: dict[str, object]
):
    vouched = ConnectorOptions(unverified="a bench")
    ours, theirs = (identity_of(engine(tmp_path, **each), vouched) for each in ({}, change))
    assert ours.differences(theirs)
    assert not ours.differences(identity_of(engine(tmp_path), vouched))


LONG_ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("rope", "lengths", "same"),
    [
        (LONG_ROPE, (4096, 2048), True),
        (LONG_ROPE, (4096, 8192), False),
        (LONG_ROPE, (8192, 16384), True),
        ({"rope_type": "longrope"}, (4096, 8192), False),
        ({"rope_type": "yarn"}, (4096, 8192), True),
    ],
)
def test_the_longest_request_that_is_allowed_counts_where_the_rope_depends_on_it(
    tmp_path: Path, rope: dict[str, object], lengths: tuple[int, int], same: bool
):
    """vLLM takes LongRoPE's long factors for every token if one request may need them."""
    folder = checkpoint(tmp_path / "m")
    one, other = (identity_of(engine(folder, rope=rope, longest=n), NO_OPTIONS) for n in lengths)
    assert (one == other) == same


def test_another_checkpoint_of_the_same_name_and_shape_differs(tmp_path: Path):
    (tmp_path / "other").mkdir()
    ours = identity_of(engine(checkpoint(tmp_path / "m")), NO_OPTIONS)
    theirs = identity_of(engine(checkpoint(tmp_path / "other" / "m", byte=1)), NO_OPTIONS)
    assert [each.split()[0] for each in ours.differences(theirs)] == ["weights"]


@pytest.mark.parametrize(
    "change", [{"load": "dummy"}, {"scales": True}, {"overrides": lambda config: config}]
)
def test_weights_that_cannot_be_looked_at_are_refused_unless_somebody_vouches(
    tmp_path: Path, change: dict[str, object]
):
    config = engine(checkpoint(tmp_path / "m"), **change)
    with pytest.raises(ModelError, match="hint"):
        identity_of(config, NO_OPTIONS)
    assert not identity_of(config, ConnectorOptions(unverified="a bench")).is_verified


def test_engines_with_other_draft_weights_differ(tmp_path: Path):
    """Rows hold the draft's cache, too."""
    folders = [checkpoint(tmp_path / f"draft{byte}", byte=byte) for byte in (0, 1)]
    found = []
    for folder in folders:
        config = engine(tmp_path / "m" if found else checkpoint(tmp_path / "m"))
        draft = SimpleNamespace(model=str(folder), revision=None)
        config.speculative_config = SimpleNamespace(draft_model_config=draft)
        found.append(identity_of(config, NO_OPTIONS))
    assert [each.split()[1] for each in found[0].differences(found[1])] == ["run.draft"]


def test_code_of_a_checkpoint_counts_where_vllm_may_run_it(tmp_path: Path):
    code = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    for name in "ab":
        (tmp_path / name).mkdir()
    folders = [checkpoint(tmp_path / name / "m", **code) for name in "ab"]
    for number, folder in enumerate(folders):
        (folder / "modeling.py").write_text(f"turned = {number}")
    for trusts in (False, True):
        configs = [engine(folder) for folder in folders]
        for config in configs:
            config.model_config.trust_remote_code = trusts
        one, other = (identity_of(config, NO_OPTIONS) for config in configs)
        assert (one == other) is not trusts


def test_a_model_that_is_nowhere_on_disk_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="neither a folder nor in the hub's cache"):
        identity_of(engine(Path("nobody/nothing-of-this-name")), NO_OPTIONS)
