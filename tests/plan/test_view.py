from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import SpecError
from kvstow.plan.view import Axis, Run, View, align_up, ceil_div, joined


def dense(*sizes: int, unit: int = 2, names: str = "block head token content") -> View:
    strides = [unit]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    axes = tuple(Axis(n, s, t) for n, s, t in zip(names.split(), sizes, strides, strict=True))
    return View(offset=64, axes=axes, unit=unit)


@given(st.integers(0, 999), st.integers(1, 99))
def test_align_up_is_the_next_multiple(value, multiple):
    result = align_up(value, multiple)
    assert result % multiple == 0
    assert 0 <= result - value < multiple
    assert ceil_div(value, multiple) == result // multiple


@given(st.sets(st.integers(0, 40)))
def test_joined_runs_cover_the_same_bytes_and_never_touch(bytes_):
    result = joined(Run(b, 1) for b in bytes_)
    assert {b for run in result for b in range(run.offset, run.end)} == bytes_
    assert all(a.end < b.offset for a, b in pairwise(result))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
)
def test_runs_are_the_bytes_of_the_view_in_the_fewest_pieces(dims, unit):
    stride = unit
    axes = []
    for i, (size, gap) in enumerate(dims):
        axes.insert(0, Axis(f"a{i}", size, stride))
        stride *= size * gap
    view = View(offset=7, axes=tuple(axes), unit=unit)
    firsts = np.zeros((), np.int64)
    for axis in view.axes:
        firsts = firsts[..., None] + np.arange(axis.size) * axis.stride
    expected = {int(f) + 7 + u for f in firsts.ravel() for u in range(unit)}
    got = view.runs()
    assert {b for run in got for b in range(run.offset, run.end)} == expected
    assert got == joined(Run(b, 1) for b in expected)
    assert view.end == max(expected) + 1


def test_an_axis_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(SpecError, match="no axis 'layer' among"):
        dense(4, 2, 2, 3).axis("layer")
