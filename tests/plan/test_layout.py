"""What a layout refuses to be. The laws themselves are in tests/laws."""

from dataclasses import replace

import pytest

from kvstow.errors import LayoutError, SpecError
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from planning import attention

LAYOUT = packed(grouped([attention("a"), attention("b")]), num_slabs=3)


@pytest.mark.parametrize(("heads", "layers"), [(1 << 13, 1), (1 << 12, 64)])
def test_a_block_in_too_many_pieces_is_refused_before_they_are_counted_out(heads, layers):
    specs = [attention(f"layers.{i}", heads=heads, tokens=2) for i in range(layers)]
    with pytest.raises(LayoutError, match=r"order: .*pieces.*at most"):
        packed(grouped(specs), num_slabs=3, site=Site(order="LHBNC"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"order": "blhnc"}, "order: 'blhnc' is none of"),
        ({"num_slabs": 0}, "slab: 0 slabs"),
        ({"base_align": 0}, "base aligned to 0"),
        ({"tp": (2, 2)}, "tp rank 2 of 2"),
        ({"nbytes": 1}, "not inside the arena of 1"),
        ({"groups": ()}, "coverage: 0 layers"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(change, words):
    with pytest.raises(LayoutError, match=words):
        replace(LAYOUT, **change)


def test_layers_and_groups_are_found_by_name():
    assert LAYOUT.group_index("full") == 0
    assert LAYOUT.view("b").offset == LAYOUT.layers["b"][2].offset
    with pytest.raises(SpecError, match="no layer 'c'"):
        LAYOUT.view("c")
    with pytest.raises(SpecError, match="no group 'window'"):
        LAYOUT.group_index("window")
