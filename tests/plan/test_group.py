import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import SpecError
from kvstow.plan.group import (
    Group,
    grouped,
    natural,
    scaled,
    split,
)
from kvstow.plan.retention import Window
from planning import attention, recurrent


def test_layers_are_in_natural_order_not_in_string_order():
    """Facts 6: `layers.10` comes after `layers.2`."""
    names = [f"model.layers.{i}.attn" for i in range(12)]
    (group,) = grouped([attention(name) for name in sorted(names)])
    assert [layer.name for layer in group.layers] == names
    assert natural("a2b") < natural("a10") < natural("a011") < natural("b")
    assert natural("a" + "9" * 5000) > natural("a" + "8" * 5000)


def test_no_layer_name_is_reserved():
    """Facts 6: a layer may be called ALL_LAYERS."""
    (group,) = grouped([attention("ALL_LAYERS"), attention("")])
    assert {layer.name for layer in group.layers} == {"ALL_LAYERS", ""}


def test_one_group_per_retention_and_block_tokens_lasting_ones_first():
    layers = [
        recurrent("r"),
        attention("w", retention=Window(4)),
        attention("w8", retention=Window(4), tokens=8),
        attention("f"),
    ]
    names = [group.name for group in grouped(layers)]
    assert names == ["full", "window4.8", "window4.2", "state"]


def test_a_layer_twice_or_none_at_all_is_refused():
    with pytest.raises(SpecError, match="'a' is listed twice"):
        grouped([attention("a"), attention("a")])
    with pytest.raises(SpecError, match="without layers"):
        grouped([])


def test_a_group_of_two_kinds_cannot_be_built():
    with pytest.raises(SpecError, match="mixes 2 kinds"):
        Group(name="g", layers=(attention("a"), attention("b", retention=Window(3))))


@given(st.integers(1, 9), st.data())
def test_split_keeps_every_layer_once_in_nearly_equal_parts(count, data):
    parts = data.draw(st.integers(1, count))
    (group,) = grouped([attention(f"l{i}") for i in range(count)])
    pieces = split(group, parts)
    assert [layer for piece in pieces for layer in piece.layers] == list(group.layers)
    sizes = [len(piece.layers) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


def test_scaling_blocks_scales_pages():
    (group,) = grouped([attention("a", tokens=2)])
    assert scaled(group, 3).block_tokens == 6
    assert scaled(group, 3).page_bytes == 3 * group.page_bytes
