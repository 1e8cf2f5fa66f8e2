"""What a layout refuses to be. The laws themselves are in tests/laws."""

from dataclasses import replace

import pytest

from kvstow.errors import BlockError, LayoutError, PlanError, SpecError
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Placement, parse_order
from kvstow.plan.pack import Site, packed
from planning import attention

LAYOUT = packed(grouped([attention("a"), attention("b")]), num_slabs=3)


@pytest.mark.parametrize(("heads", "layers"), [(1 << 18, 1), (1 << 12, 64)])
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
    assert LAYOUT.view("b").offset == LAYOUT.layers["b"][2][0].offset
    with pytest.raises(SpecError, match=r"no layer 'c' .*\n\nhint: .*'a'"):
        LAYOUT.view("c")
    with pytest.raises(SpecError, match="no group 'window'"):
        LAYOUT.group_index("window")


@pytest.mark.parametrize("block", [-1, 3, 10**9])
def test_a_block_that_is_not_there_has_no_bytes(block):
    with pytest.raises(BlockError, match=f"group 'full': no block {block} among 3"):
        LAYOUT.runs(0, block)


@pytest.mark.parametrize("group", [1, "full", None])
def test_a_group_that_is_not_there_is_refused_with_what_to_do(group):
    for ask in (LAYOUT.row_bytes, LAYOUT.row_stride, lambda group: LAYOUT.runs(group, 1)):
        with pytest.raises(SpecError, match=rf"no group {group!r}: .*\n\nhint: .*group_index"):
            ask(group)


def test_a_page_of_several_sections_is_viewed_by_section_by_field_or_as_bytes():
    layer = attention("l.0", heads=2, dim=4, tokens=3, value_section=1, align=64)
    layout = packed(grouped([layer]), num_slabs=3)
    assert layout.view("l.0", 1).offset == 2 * 3 * 8
    assert layout.view("l.0", 1).shape == (3, 2, 3, 4)
    page = layout.page("l.0")
    assert (page.shape, page.strides) == ((3, 128), (128, 1))
    with pytest.raises(SpecError, match="2 sections, with strides of their own"):
        layout.view("l.0")
    with pytest.raises(SpecError, match="no section 2 among 2"):
        layout.view("l.0", 2)
    with pytest.raises(SpecError, match="in 2 pieces"):
        packed(grouped([layer]), num_slabs=3, site=Site(order="LHBNC")).page("l.0")


def test_sections_that_overlap_or_are_not_placed_break_a_law():
    layer = attention("l.0", heads=2, dim=4, tokens=3, value_section=1)
    layout = packed(grouped([layer]), num_slabs=3)
    (rows,) = layout.groups
    (page,) = rows.placements
    assert page == (Placement(0, 128, 24, 8), Placement(48, 128, 24, 8))
    for second, words in (
        ((40, 128, 24, 8), "overlap in block 0"),
        ((), "its pages have 2 sections, 1 are placed"),
        ((47, 128, 24, 8), "section 1: offset 47 is not a multiple of 2"),
        ((48, 128, 24, 4), "section 1: token stride 4 is not the 8 bytes of a cell"),
        ((1000, 128, 24, 8), "not inside the arena"),
        ((48, 64, 24, 8), "section 1: block stride 64"),
    ):
        pages = ((page[0], *([Placement(*second)] if second else [])),)
        moved = replace(rows, placements=pages)
        with pytest.raises(LayoutError, match=words):
            replace(layout, groups=(moved,))


def test_pages_of_one_geometry_are_one_set_section_by_section():
    alike = [attention(f"l.{i}", heads=2, dim=4, tokens=3, value_section=1) for i in range(2)]
    layout = packed(grouped([*alike, attention("l.2", heads=1, tokens=3)]), num_slabs=3)
    (sets,) = layout.page_sets
    assert [each.layers for each in sets] == [("l.0", "l.1"), ("l.0", "l.1"), ("l.2",)]
    for section, each in enumerate(sets[:2]):
        offsets = [layout.view(name, section).offset for name in each.layers]
        assert each.offsets.tolist() == offsets
        assert each.place == layout.layers["l.0"][2][section]
        assert each.spec.fields == layout.layers["l.0"][1].sections[section].fields


@pytest.mark.parametrize(
    ("text", "order"),
    [*((order.lower(), order) for order in ORDERS), ("HND", "BLHNC"), ("nhd", "BLNHC")],
)
def test_orders_are_read_in_the_spelling_people_use(text, order):
    assert parse_order(text) == order


def test_the_order_of_a_page_is_the_one_its_name_says():
    """HND: the heads of a page are farther apart than its tokens; NHD: the other way."""
    for name, outer, inner in (("HND", "head", "token"), ("NHD", "token", "head")):
        site = Site(order=parse_order(name))
        view = packed(grouped([attention("a", tokens=4, heads=3)]), num_slabs=2, site=site).view(
            "a"
        )
        assert view.axis(outer).stride > view.axis(inner).stride


@pytest.mark.parametrize("text", ["", "NHCLB", "BLHN", "H N D", 3, None])
def test_an_unknown_order_is_refused_with_those_there_are(text):
    with pytest.raises(PlanError, match=r"order .* is none of .*BLHNC.*\n\nhint: "):
        parse_order(text)
