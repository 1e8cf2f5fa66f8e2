"""Times and sizes of an agent: those that cannot be are refused."""

import math
from dataclasses import fields

import pytest

from kvstow.errors import SpecError
from kvstow.transfer.options import LEAST_SLOT_BYTES, Options

SECONDS = [each.name for each in fields(Options) if each.name.endswith("_seconds")]


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_is_above_0_and_has_an_end(name, seconds):
    with pytest.raises(SpecError, match=name):
        Options(**{name: seconds})


@pytest.mark.parametrize("slot_bytes", [-1, 0, 1, LEAST_SLOT_BYTES - 1])
def test_a_staging_slot_has_a_least_size(slot_bytes):
    with pytest.raises(SpecError, match=f"slot_bytes is {slot_bytes}, not at least"):
        Options(slot_bytes=slot_bytes)
    assert Options(slot_bytes=LEAST_SLOT_BYTES).slot_bytes == LEAST_SLOT_BYTES


@pytest.mark.parametrize("word", [{"direction": "push"}, {"direction": ""}, {"digest": "none"}])
def test_a_way_or_a_policy_that_there_is_not_is_refused(word):
    with pytest.raises(SpecError, match=f"{next(iter(word))} is .*\n\nhint: one of"):
        Options(**word)


def test_a_copy_has_at_least_one_program():
    with pytest.raises(SpecError, match="copy_programs is 0, not at least 1"):
        Options(copy_programs=0)
    assert Options(copy_programs=8).copy_programs == 8
