"""The still picture: well-formed, to scale, nothing outside, nothing on top of anything."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed, separate, union
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.render.svg import BAR_HEIGHT, MARGIN, WIDTH, layout_svg

SVG = "{http://www.w3.org/2000/svg}"


def lanes(layout, width=WIDTH):
    """Rectangles by lane, top to bottom: (x, width, class, title)."""
    root = ElementTree.fromstring(layout_svg(layout, width=width))
    found = {}
    for rect in root.iter(f"{SVG}rect"):
        found.setdefault(float(rect.get("y")), []).append(
            (
                float(rect.get("x")),
                float(rect.get("width")),
                rect.get("class"),
                rect.find(f"{SVG}title").text,
            )
        )
    return [found[y] for y in sorted(found)]


def tiny(heads=1, states=1, layers=1):
    content = Field("k", DType.BFLOAT16, (Extent.whole("content", 1),))
    return [
        LayerSpec(
            name=f"layers.{i}",
            retention=Full(),
            block_tokens=states,
            states=states,
            heads=Extent.whole("head", heads),
            fields=(content,),
        )
        for i in range(layers)
    ]


@pytest.mark.parametrize("pack", [packed, union, separate])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["gemma-3-270m", "deepseek-v4-flash", "jamba-mini"])
def test_every_layout_has_a_picture_in_which_nothing_overlaps_or_sticks_out(name, order, pack):
    layout = pack(grouped(model_layers(name).layers), budget=2 << 30, site=Site(order=order))
    for lane in lanes(layout):
        for x, width, _, _ in lane:
            assert round(x, 2) >= MARGIN
            assert x + width <= WIDTH - MARGIN + 0.5
        for (x, width, _, _), (after, _, _, _) in pairwise(lane):
            assert x + width <= after + 0.5  # a piece is drawn 0.3 pixels wide at least


@pytest.mark.parametrize(("heads", "states", "layers"), [(1, 1, 1), (2, 2, 2), (1, 2, 1)])
def test_the_smallest_layouts_have_pictures(heads, states, layers):
    layout = packed(grouped(tiny(heads, states, layers)), num_slabs=2)
    row = lanes(layout)[1]
    assert sum(style.startswith("g") for _, _, style, _ in row) == layers


def test_rows_are_drawn_where_the_slab_law_has_them():
    layout = packed(grouped(model_layers("deepseek-v4-flash").layers), budget=8 << 30)
    scale = (WIDTH - 2 * MARGIN) / layout.slab_bytes
    for g, lane in enumerate(lanes(layout)[: len(layout.groups)]):
        rows = [(x, width) for x, width, style, _ in lane if style != "pad"]
        stride = layout.slab_bytes // layout.groups[g].rows_per_slab
        assert len(rows) == layout.groups[g].rows_per_slab
        for row, (x, width) in enumerate(rows):
            assert x == pytest.approx(MARGIN + row * stride * scale, abs=0.01)
            assert width == pytest.approx(layout.row_bytes(g) * scale, abs=0.01)


def test_padding_is_drawn_as_padding():
    layout = union(grouped(model_layers("deepseek-v4-flash").layers), budget=8 << 30)
    scale = (WIDTH - 2 * MARGIN) / layout.slab_bytes
    for g, lane in enumerate(lanes(layout)[: len(layout.groups)]):
        drawn = sum(width for _, width, style, _ in lane if style == "pad")
        assert drawn == pytest.approx((layout.slab_bytes - layout.row_bytes(g)) * scale, abs=0.31)


def test_a_picture_says_what_it_shows_and_escapes_names():
    layout = packed(grouped(tiny()), num_slabs=2, site=Site(model='<b>"&model'))
    root = ElementTree.fromstring(layout_svg(layout))
    assert root.find(f"{SVG}title").text == '<b>"&model: one slab, 64 bytes: one row'
    assert root.get("role") == "img"
    assert int(root.get("height")) >= 3 * BAR_HEIGHT


def test_a_picture_names_copies_of_both_kinds():
    layout = packed(grouped(model_layers("gemma-3-270m").layers), budget=1 << 30)
    picture = layout_svg(layout)
    tensors = layout.groups[0].group.num_tensors
    assert f"one copy of {layout.row_bytes(0):,} bytes" in picture
    assert f"{tensors} copies from as many places" in picture


def test_the_picture_in_the_documentation_is_this_renderer_s():
    from pathlib import Path

    model = model_layers("deepseek-v4-flash")
    layout = packed(grouped(model.layers), budget=8 << 30, site=Site(model=model.name))
    committed = Path(__file__).parents[2] / "docs" / "assets" / "slab.svg"
    assert committed.read_text("utf-8") == layout_svg(layout), "hint: scripts/docs --refresh"
