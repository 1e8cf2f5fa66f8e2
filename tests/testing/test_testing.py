"""What the library ships for tests is itself as it says."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstow.testing
from kvstow.memory.arena import Arena
from kvstow.memory.copy import block_copies, copy
from kvstow.memory.digest import digest
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks
from kvstow.testing.layouts import layouts
from kvstow.testing.patterns import block_contents, fill, pattern


@given(layouts(), st.data())
def test_every_drawn_layout_holds_blocks_that_survive_a_copy(layout, data):
    group = data.draw(st.integers(0, len(layout.groups) - 1))
    count = layout.num_blocks(group)
    ids = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True))
    others = data.draw(st.permutations(range(count)))[: len(ids)]
    with Arena(layout) as a, Arena(layout) as b:
        fill(a, 1)
        fill(b, 2)
        copy(a, b, block_copies(layout, group, ids, others)).wait()
        here, there = Blocks.first(ids), Blocks.first(others)
        assert block_contents(a, group, here) == block_contents(b, group, there)
        rows = layout.groups[group].group
        tokens = 1 if isinstance(rows.retention, State) else len(ids) * rows.block_tokens
        if type(rows.retention).__name__ != "Encoder":
            assert digest(a, {group: here}, tokens) == digest(b, {group: there}, tokens)


def test_a_pattern_is_the_same_for_the_same_seed_and_has_no_short_period():
    one, again, other = pattern(4096, 1), pattern(4096, 1), pattern(4096, 2)
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert not any(np.array_equal(one[shift:], one[:-shift]) for shift in range(1, 256))


LIGHT = """
import sys
absent = ("torch", "hypothesis", "transformers", "numpy")
sys.modules.update(dict.fromkeys(absent))  # importing None is a ModuleNotFoundError
import kvstow.testing
assert "check_attention" in kvstow.testing.__all__
"""


def test_the_package_imports_without_what_its_modules_need():
    run = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", kvstow.testing.__all__)
def test_every_name_that_the_package_lists_is_there(name):
    found = getattr(kvstow.testing, name)
    assert found.__name__ == name
    assert found.__module__.startswith("kvstow.testing.")


def test_a_name_that_the_package_does_not_list_is_missing():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvstow.testing.nothing
