"""Law 1: a page of layer l in block b starts at offset[l] + b · stride[l], in bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Site, packed
from kvstow.plan.spec import DType
from planning import attention, element_bytes, layouts


def strided(layout: Layout, layer: str, field: str) -> np.ndarray:
    """NumPy's own idea of where the elements of a field lie: their byte numbers."""
    view = layout.field(layer, field)
    return view.offset + sum(
        np.arange(axis.size).reshape([-1 if i == j else 1 for j in range(len(view.axes))])
        * axis.stride
        for i, axis in enumerate(view.axes)
    )


def sections(layout: Layout) -> list[tuple[str, int]]:
    return [
        (name, number)
        for name, (_, spec, _) in layout.layers.items()
        for number in range(1 + max(field.section for field in spec.fields))
    ]


@given(layouts(), st.data())
def test_every_field_view_is_the_address_law_element_by_element(layout, data):
    layer = data.draw(st.sampled_from(sorted(layout.layers)))
    group, spec, _ = layout.layers[layer]
    field = data.draw(st.sampled_from([f.name for f in spec.fields]))
    block = data.draw(st.integers(0, layout.num_blocks(group) - 1))
    firsts = strided(layout, layer, field)[block].ravel()
    unit = spec.field(field).dtype.unit
    seen = (firsts[:, None] + np.arange(unit)).ravel()
    assert sorted(seen.tolist()) == sorted(element_bytes(layout, layer, field, block))


@given(layouts(), st.data())
def test_a_field_view_reads_what_was_written_at_the_planned_address(layout, data):
    memory = np.zeros(layout.nbytes, np.uint8)
    layer = data.draw(st.sampled_from(sorted(layout.layers)))
    group, spec, _ = layout.layers[layer]
    block = layout.num_blocks(group) - 1
    value = 1
    for field in spec.fields:
        for byte in element_bytes(layout, layer, field.name, block):
            memory[byte] = value % 251
            value += 1
    value = 1
    for field in spec.fields:
        view = layout.field(layer, field.name)
        shape = (*view.shape, view.unit)
        strides = (*view.strides, 1)
        array = np.lib.stride_tricks.as_strided(memory[view.offset :], shape, strides)
        got = array[block].ravel()
        assert got.tolist() == [(value + i) % 251 for i in range(got.size)]
        value += got.size


@given(layouts())
def test_axes_nest_in_the_stated_order(layout):
    for layer, section in sections(layout):
        view = layout.view(layer, section)
        strides = {a.name[0]: a.stride for a in view.axes if a.size > 1}
        letters = [
            {"b": "B", "h": "H", "t": "N", "c": "C"}[name]
            for name in sorted(strides, key=lambda name: -strides[name])
        ]
        assert letters == [letter for letter in layout.order if letter in letters]


def test_two_blocks_two_heads_two_tokens_are_never_confused_in_any_order():
    layers = [attention(f"layers.{i}", heads=2, dim=2, tokens=2) for i in range(2)]
    for order in ORDERS:
        layout = packed(grouped(layers), num_slabs=2, site=Site(order=order))
        for layer in layout.layers:
            view = layout.view(layer)
            assert [axis.name for axis in view.axes] == ["block", "head", "token", "content"]
            assert view.shape == (2, 2, 2, 4)


def test_one_of_everything_still_has_strides_of_a_whole_page():
    layers = [attention(f"layers.{i}", heads=1, dim=8, tokens=1) for i in range(2)]
    for order in ORDERS:
        view = packed(grouped(layers), num_slabs=2, site=Site(order=order)).view("layers.1")
        assert all(axis.stride >= 16 for axis in view.axes[:3]), order


def test_four_bit_elements_are_counted_in_bytes():
    layer = attention("a", heads=2, dim=6, tokens=2, dtype=DType.INT4)
    view = packed(grouped([layer]), num_slabs=2).field("a", "v")
    assert view.unit == 1
    assert view.shape == (2, 2, 2, 3)
