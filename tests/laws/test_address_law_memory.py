"""Law 1 on real memory: the element at [block, head, token, content] lies where the order says.

The oracle is a NumPy array whose axes stand in the order's letters and whose entries are their
own positions; transposed to layer, block, head, token, content it says where everything lies.
"""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstow.memory.arena import Arena
from kvstow.memory.copy import block_copies, copy
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, State
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.route.blocks import Blocks
from kvstow.route.route import plan_route
from planning import TIGHT, layouts, section_numbers

SIZES = [
    (1, 2, 1, 1, 2),
    (2, 2, 2, 2, 2),
    (2, 3, 2, 2, 4),
    (3, 2, 3, 3, 6),
    (2, 4, 4, 4, 4),
    (1, 2, 8, 1, 2),
    (2, 2, 1, 8, 2),
]
"""Layers, blocks, heads, tokens, elements of a cell: ones, twos, and equal ones."""


def layer(name: str, kind: str, dtype: DType, heads: int, tokens: int, size: int) -> LayerSpec:
    """A layer whose cell has `size` elements."""
    half, whole = (Extent.whole("content", size // 2),), (Extent.whole("content", size),)
    fields = {
        "kv": (Field("k", dtype, half), Field("v", dtype, half)),
        "latent": (Field("latent", dtype, whole),),
        "state": (
            Field("conv", dtype, (Extent.whole("channel", size // 2), Extent.whole("tap", 1))),
            Field("ssm", dtype, (Extent.whole("row", 1), Extent.whole("column", size // 2))),
        ),
    }[kind]
    recurrent = kind == "state"
    return LayerSpec(
        name=name,
        retention=State() if recurrent else Full(),
        block_tokens=tokens,
        states=1 if recurrent else tokens,
        heads=Extent.whole("head", 1 if kind != "kv" else heads),
        fields=fields,
    )


def oracle(order: str, sizes: dict[str, int]) -> np.ndarray:
    """Positions by layer, block, head, token, content, counted in elements."""
    positions = np.arange(np.prod([sizes[letter] for letter in order]))
    array = positions.reshape([sizes[letter] for letter in order])
    return array.transpose([order.index(letter) for letter in "LBHNC"])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["kv", "latent", "state"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT8_E4M3])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_element_of_every_view_lies_where_the_order_says(order, kind, dtype, sizes):
    num_layers, num_blocks, heads, tokens, size = sizes
    specs = [layer(f"l.{i}", kind, dtype, heads, tokens, size) for i in range(num_layers)]
    layout = packed(grouped(specs), num_slabs=num_blocks, site=Site(order=order, alignment=TIGHT))
    spec = specs[0]
    where = oracle(
        order, {"L": num_layers, "B": num_blocks, "H": spec.heads.size, "N": spec.states, "C": size}
    )
    with Arena(layout) as arena:
        assert layout.nbytes == where.size * dtype.unit
        unit = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.unit]
        memory = arena.bytes.view(unit)
        memory.copy_(torch.arange(where.size) % 251)
        for i in range(num_layers):
            seen = arena.tensor(f"l.{i}").view(unit).numpy()
            assert np.array_equal(seen, where[i] % 251)
            parts = [arena.field(f"l.{i}", f.name).view(unit).numpy() for f in spec.fields]
            flat = [part.reshape(*part.shape[:3], -1) for part in parts]
            assert np.array_equal(np.concatenate(flat, axis=3), where[i] % 251)


@given(layouts(), st.data())
def test_an_element_written_through_one_view_is_read_through_every_other_path(layout, data):
    name = data.draw(st.sampled_from(sorted(layout.layers)))
    group, spec, places = layout.layers[name]
    field = data.draw(st.sampled_from(spec.fields))
    block = data.draw(st.integers(0, layout.num_blocks(group) - 1))
    head = data.draw(st.integers(0, spec.heads.size - 1))
    state = data.draw(st.integers(0, spec.states - 1))
    byte = data.draw(st.integers(0, field.nbytes - 1))
    with Arena(layout) as arena:
        unit = field.dtype.unit
        at = np.unravel_index(
            byte // unit, [a.size for a in layout.field(name, field.name).axes[3:]]
        )
        view = arena.numpy(name, field.name)
        raw = np.lib.stride_tricks.as_strided(
            arena.bytes.numpy()[layout.field(name, field.name).offset :],
            (*view.shape, unit),
            (*view.strides, 1),
        )
        raw[(block, head, state, *at, byte % unit)] = 0x5A
        offset, head_stride, token_stride = section_numbers(places, field.section)
        page_start = offset + block * places[0].block_stride
        cell_start = page_start + head * head_stride + state * token_stride
        address = cell_start + spec.field_offsets[field.name] + byte
        memory = arena.bytes.numpy()
        assert np.flatnonzero(memory).tolist() == [address]
        if len(spec.sections) == 1:
            page = arena.tensor(name).view(torch.uint8)
            cell = page[block, head, state].reshape(-1)
            assert int(cell[spec.field_offsets[field.name] + byte]) == 0x5A
            assert int(cell.count_nonzero()) == 1
        through_field = arena.field(name, field.name)[block, head, state].contiguous()
        assert int(through_field.view(torch.uint8).reshape(-1)[byte]) == 0x5A


@pytest.mark.parametrize(("source", "destination"), list(product(ORDERS, ORDERS)))
def test_an_element_keeps_its_coordinates_when_copied_to_another_order(source, destination):
    specs = [layer(f"l.{i}", "kv", DType.BFLOAT16, 2, 4, 4) for i in range(2)]
    mine = packed(grouped(specs), num_slabs=4, site=Site(order=source))
    theirs = packed(grouped(specs), num_slabs=6, site=Site(order=destination))
    ids, others = np.array([3, 1]), np.array([2, 5])
    with Arena(mine) as a, Arena(theirs) as b:
        for i in range(2):
            values = torch.arange(a.tensor(f"l.{i}").numel()) + 1000 * i
            a.tensor(f"l.{i}").view(torch.int16).copy_(values.reshape(a.tensor("l.0").shape))
        moves = plan_route(mine, theirs).copies(
            {0: Blocks.first(ids)}, {0: Blocks.first(others)}, 8
        )
        copy(a, b, moves).wait()
        for i in range(2):
            assert torch.equal(
                a.tensor(f"l.{i}").view(torch.int16)[ids],
                b.tensor(f"l.{i}").view(torch.int16)[others],
            )
        assert not b.tensor("l.0")[[0, 1, 3, 4]].any()


@given(layouts(), st.data())
def test_rows_copied_between_arenas_of_one_layout_are_whole_and_alone(layout, data):
    group = data.draw(st.integers(0, len(layout.groups) - 1))
    count = layout.num_blocks(group)
    ids = data.draw(st.lists(st.integers(0, count - 1), max_size=4, unique=True))
    others = data.draw(st.permutations(range(count)))[: len(ids)]
    with Arena(layout) as a, Arena(layout) as b:
        a.bytes.copy_(torch.randint(0, 256, (a.nbytes,), dtype=torch.uint8))
        b.bytes.fill_(0xA5)
        expected = b.bytes.clone()
        for here, there in zip(ids, others, strict=True):
            for x, y in zip(layout.runs(group, here), layout.runs(group, there), strict=True):
                expected[y.offset : y.end] = a.bytes[x.offset : x.end]
        copy(a, b, block_copies(layout, group, ids, others)).wait()
        assert torch.equal(b.bytes, expected)
