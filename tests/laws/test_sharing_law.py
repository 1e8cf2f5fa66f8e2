"""Law 2: two pages share bytes only if they belong to different groups, in one slab."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import LayoutError
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout, moved
from kvstow.plan.pack import packed
from kvstow.plan.retention import Window
from planning import attention, block_bytes, layouts


def brute_force_clash(layout: Layout) -> bool:
    """Whether any byte is claimed twice by one group, or by two groups in different slabs."""
    nbytes = 1 + max(
        int(block_bytes(layout, g, layout.num_blocks(g) - 1).max())
        for g in range(len(layout.groups))
    )
    slab_of = np.full(nbytes, -1)
    for g, rows in enumerate(layout.groups):
        mine = np.zeros(nbytes, int)
        for block in range(layout.num_blocks(g)):
            claimed = block_bytes(layout, g, block)
            np.add.at(mine, claimed, 1)
            slab = block // rows.rows_per_slab
            before = slab_of[claimed]
            if ((before >= 0) & (before != slab)).any():
                return True
            slab_of[claimed] = slab
        if (mine > 1).any():
            return True
    return False


def unchecked(layout: Layout, **changes: object) -> Layout:
    """The layout with changes that its own checks might refuse."""
    made = object.__new__(Layout)
    for field in fields(layout):
        object.__setattr__(made, field.name, changes.get(field.name, getattr(layout, field.name)))
    return made


@given(layouts())
def test_no_planned_layout_has_two_owners_of_a_byte(layout):
    assert not brute_force_clash(layout)


@given(layouts())
def test_every_byte_of_every_block_is_inside_the_arena(layout):
    for g in range(len(layout.groups)):
        for block in (0, layout.num_blocks(g) - 1):
            seen = block_bytes(layout, g, block)
            assert min(seen) >= 0
            assert max(seen) < layout.nbytes


@given(layouts())
def test_a_block_lies_inside_its_own_runs(layout):
    for g in range(len(layout.groups)):
        block = layout.num_blocks(g) - 1
        inside = {byte for run in layout.runs(g, block) for byte in range(run.offset, run.end)}
        assert set(block_bytes(layout, g, block).tolist()) <= inside


@given(layouts())
def test_sharing_sets_are_the_groups_with_bytes_in_common(layout):
    owners = np.zeros(layout.nbytes, int)
    for g in range(len(layout.groups)):
        for block in range(layout.num_blocks(g)):
            for run in layout.runs(g, block):
                owners[run.offset : run.end] |= 1 << g
    for mask in np.unique(owners).tolist():
        together = {g for g in range(len(layout.groups)) if mask >> g & 1}
        assert any(together <= set(sharing) for sharing in layout.sharing)
    assert sorted(g for sharing in layout.sharing for g in sharing) == list(
        range(len(layout.groups))
    )


@given(layouts(), st.data())
def test_the_static_checker_accepts_nothing_that_brute_force_refuses(layout, data):
    g = data.draw(st.integers(0, len(layout.groups) - 1))
    rows = layout.groups[g]
    i = data.draw(st.integers(0, len(rows.placements) - 1))
    old = rows.placements[i]
    unit = rows.group.layers[i].unit
    step = st.integers(-8, 8).map(lambda n: n * unit)
    stride = max(unit, old[0].block_stride + data.draw(step))
    new = tuple(
        replace(place, offset=max(0, place.offset + data.draw(step)), block_stride=stride)
        for place in old
    )
    places = (*rows.placements[:i], new, *rows.placements[i + 1 :])
    changed = (*layout.groups[:g], replace(rows, placements=places), *layout.groups[g + 1 :])
    mutant = unchecked(layout, groups=changed)
    inside = all(
        max(block_bytes(mutant, h, mutant.num_blocks(h) - 1)) < mutant.nbytes
        for h in range(len(mutant.groups))
    )
    if brute_force_clash(mutant) or not inside:
        with pytest.raises(LayoutError):
            replace(layout, groups=changed)


def test_two_layers_of_one_group_at_one_place_are_refused():
    layout = packed(grouped([attention("a"), attention("b")]), num_slabs=3)
    rows = layout.groups[0]
    same = replace(rows, placements=(rows.placements[0], rows.placements[0]))
    with pytest.raises(LayoutError, match="overlap in block 0"):
        replace(layout, groups=(same,))


def test_two_groups_in_step_within_a_slab_may_share_and_out_of_step_may_not():
    layers = [attention("a", dim=64), attention("b", dim=64, retention=Window(4))]
    layout = packed(grouped(layers), num_slabs=3)
    assert layout.sharing == ((0, 1),)
    full, window = layout.groups
    assert window.rows_per_slab == 1
    place = window.placements[0]
    half = moved(place, place[0].block_stride // 2, place[0].block_stride)
    with pytest.raises(LayoutError, match="overlap without sharing a slab"):
        replace(
            layout,
            groups=(full, replace(window, placements=(half,))),
            nbytes=layout.nbytes * 2,
        )
