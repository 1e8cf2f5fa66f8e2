"""The identity of an engine whose weights are changed in place."""

import pytest

from kvstow.adapters.vllm.identity import EngineWeights
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
