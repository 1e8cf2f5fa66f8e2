from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import SpecError
from kvstow.plan.view import Axis, Run, View, align_up, joined


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


def test_fixing_an_axis_moves_the_offset_and_drops_it():
    view = dense(4, 2, 2, 3).at("head", 1)
    assert view.offset == 64 + view_stride(dense(4, 2, 2, 3), "head")
    assert [axis.name for axis in view.axes] == ["block", "token", "content"]


def view_stride(view: View, name: str) -> int:
    return view.axis(name).stride


def test_an_index_outside_an_axis_is_refused_with_both_numbers():
    with pytest.raises(SpecError, match="index 2 is outside axis 'head' of size 2"):
        dense(4, 2, 2, 3).at("head", 2)
    with pytest.raises(SpecError, match="no axis 'layer'"):
        dense(4, 2, 2, 3).axis("layer")


def test_a_kernel_block_smaller_than_ours_is_a_view_with_the_token_axis_cut():
    """Facts 15: on packed rows the pieces stand beside the block axis."""
    packed = View(
        offset=0,
        axes=(
            Axis("block", 3, 1000),
            Axis("head", 2, 64),
            Axis("token", 8, 8),
            Axis("content", 4, 2),
        ),
        unit=2,
    )
    cut = packed.subdivided("token", 2)
    assert [(a.name, a.size, a.stride) for a in cut.axes] == [
        ("block", 3, 1000),
        ("sub", 4, 16),
        ("head", 2, 64),
        ("token", 2, 8),
        ("content", 4, 2),
    ]
    with pytest.raises(SpecError, match="of size 8 cannot be cut into 3s"):
        packed.subdivided("token", 3)


def test_cutting_tokens_of_compact_one_head_pages_just_makes_more_blocks():
    view = View(
        offset=0,
        axes=(
            Axis("block", 3, 64),
            Axis("head", 1, 64),
            Axis("token", 8, 8),
            Axis("content", 4, 2),
        ),
        unit=2,
    )
    assert view.subdivided("token", 2).axis("block") == Axis("block", 12, 16)
