"""Identities: equal where the computation is, and every difference in words."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import CONFIG, checkpoint
from kvstow.errors import ManifestError, ModelError, SpecError
from kvstow.plan.group import grouped
from kvstow.plan.identity import WITHOUT_EFFECT, Identity, config_fields
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import decode, encode, fingerprint
from kvstow.plan.pack import packed
from kvstow.route.compare import differences
from planning import attention


def simple_layout() -> Layout:
    return packed(grouped([attention("layers.0")]), num_slabs=4)


def test_one_checkpoint_in_two_places_is_one_identity(tmp_path: Path):
    one = Identity.of(checkpoint(tmp_path / "here" / "llama"))
    other = Identity.of(checkpoint(tmp_path / "there" / "llama"))
    assert one == other
    assert one.digest == other.digest
    assert one.differences(other) == ()
    assert one.is_verified
    assert one.is_of_files


def test_a_model_is_named_after_its_folder_or_as_it_is_called(tmp_path: Path):
    folder = checkpoint(tmp_path / "llama")
    assert Identity.of(folder).model == "llama"
    assert Identity.of(folder, model="meta/llama").model == "meta/llama"


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


def test_an_identity_says_either_its_weights_or_why_not():
    with pytest.raises(SpecError, match="hint: pass identity="):
        Identity(model="m")
    with pytest.raises(SpecError):
        Identity(model="m", weights="aa", unverified_because="but")
    with pytest.raises(SpecError):
        Identity(model="m", weights="unverified")
    with pytest.raises(SpecError, match="sorted"):
        Identity(model="m", weights="aa", config=(("b", "1"), ("a", "1")))


def test_a_salt_is_not_shown_and_none_is_not_set():
    one, other = (Identity(model="m", weights="aa", salt=salt) for salt in ("", "secret"))
    (found,) = one.differences(other)
    assert found.startswith("salt is not set in the source, ")
    assert "secret" not in found


def test_tensors_in_memory_identify_a_model_in_any_order():
    tensors = [("a", "f32 [2]", b"12345678"), ("b", "f32 [2]", b"87654321")]
    one = Identity.of_tensors("m", CONFIG, tensors)
    assert one.is_verified
    assert not one.is_of_files
    assert len(one.weights) == len("memory:") + 32
    assert one == Identity.of_tensors("m", CONFIG, reversed(tensors))
    changed = [tensors[0], ("b", "f32 [2]", b"87654320")]
    assert one.differences(Identity.of_tensors("m", CONFIG, changed))
    with pytest.raises(ModelError):
        Identity.of_tensors("m", CONFIG, [])


def test_a_request_has_its_own_adapter_and_salt_or_the_models():
    model = Identity(model="m", weights="aa", adapter="poems", salt="ours")
    assert model.for_request() is model
    for adapter, salt in (("prose", ""), ("", "theirs"), ("prose", "theirs")):
        request = model.for_request(adapter=adapter, salt=salt)
        assert (request.adapter, request.salt) == (adapter or "poems", salt or "ours")


def test_an_identity_is_part_of_manifest_and_fingerprint():
    layout = simple_layout()
    one = layout.identified(Identity(model="m", weights="aa", config=(("rope_theta", "1"),)))
    other = layout.identified(Identity(model="m", weights="bb", config=(("rope_theta", "1"),)))
    assert decode(encode(one)) == one
    assert len({fingerprint(x) for x in (layout, one, other)}) == 3
    assert differences(one, one) == ()
    assert any("'aa' in the source, 'bb'" in text for text in differences(one, other))
    assert any("not known" in text for text in differences(one, layout))


def test_an_identity_of_a_manifest_says_something():
    plain = json.loads(encode(simple_layout().identified(Identity.unverified("a test"))))
    plain["layout"]["identity"]["unverified_because"] = ""
    with pytest.raises(ManifestError, match="spec"):
        decode(json.dumps(plain).encode())


def test_an_identity_without_weights_is_not_of_files():
    assert not Identity.unverified("a test").is_of_files


# ── one form for each configuration ───────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"rope": {}}),
        ({}, {"rope": ""}),
        ({}, {"rope": None}),
        ({}, {"rope": []}),
        ({"rope": {}}, {"rope": {"use_cache": True, "inner": {}}}),
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({'a"."b': 1}, {"a": {"b": 1}}),
        ({"a": "false"}, {"a": False}),
        ({"a": "1"}, {"a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": "null"}, {"a": None}),
        ({"a": "[1]"}, {"a": [1]}),
        ({"a": {"1": 2}}, {"a": {1: 2}}),
        ({"a": [{"1": 2}]}, {"a": [{1: 2}]}),
        ({"a": "\ud800"}, {"a": "\ud801"}),
        ({"a": "x" * 300}, {"a": "x" * 301}),
    ],
)
def test_configurations_that_say_different_things_are_different(one: Any, other: Any):
    identities = [
        Identity(model="m", weights="aa", config=config_fields(each)) for each in (one, other)
    ]
    assert identities[0].digest != identities[1].digest
    assert identities[0].differences(identities[1])


KEYS = st.one_of(st.sampled_from(["a", "b", "a.b", '"a"', ""]), st.text(max_size=3)).filter(
    lambda key: key not in WITHOUT_EFFECT
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "false", "1", "null", "{}", "[]", "a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=6,
)
CONFIGS = st.dictionaries(KEYS, VALUES, max_size=3)


@given(CONFIGS, CONFIGS)
def test_two_configurations_have_the_same_fields_only_if_they_are_the_same(one: Any, other: Any):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (config_fields(one) == config_fields(other)) == same


TEXTS = st.sampled_from(["", "a", "unverified", "true", "config a", "not set"])


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    names = ("model", "kv_dtype", "interior", "tokenizer", "adapter", "salt")
    texts: dict[str, Any] = {name: draw(TEXTS) for name in names}
    verified = draw(st.booleans())
    which = "weights" if verified else "unverified_because"
    config = draw(st.dictionaries(TEXTS, TEXTS, max_size=3))
    texts[which] = draw(st.sampled_from(["a", "true", "not set"]))
    return Identity(**texts, config=tuple(sorted(config.items())))


@given(identities(), identities())
def test_digests_differ_exactly_where_there_are_differences_and_these_where_anything_counts(
    one: Identity, other: Identity
):
    differences = one.differences(other)
    assert (one.digest == other.digest) == (differences == ())
    unexplained = (
        replace(each, unverified_because="x") for each in (one, other) if not each.weights
    )
    both_unverified = not one.is_verified and not other.is_verified
    same = len({*unexplained}) == 1 if both_unverified else one == other
    assert (differences == ()) == same


def test_a_lone_surrogate_in_a_configuration_is_written_down(tmp_path: Path):
    identity = Identity.of(checkpoint(tmp_path, config={"rope_type": "\ud800"}))
    layout = simple_layout().identified(identity)
    assert decode(encode(layout)).identity == identity
