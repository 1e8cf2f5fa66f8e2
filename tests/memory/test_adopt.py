"""Engine memory: taken as it is when it keeps its layout, refused with both numbers when not."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

from kvstow.errors import CopyError, MemoryLayoutError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.memory.digest import digest
from kvstow.plan.group import Group, grouped
from kvstow.plan.layout import ORDERS, Layout, Order
from kvstow.plan.pack import Alignment, Site, packed, separate
from kvstow.plan.view import Run
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.route import plan_route
from planning import attention

AXES = ("block", "head", "token", "content")
LETTERS = {"block": "B", "head": "H", "token": "N"}


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Give every element its own value; bf16 holds small whole numbers exactly."""
    tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape).remainder(199))
    return tensor


def engine_layout(groups: Sequence[Group], order: Order, num_slabs: int) -> Layout:
    """One buffer: layer by layer, or block by block."""
    tight = Alignment(base=1, row=1)
    make = separate if order.startswith("L") else packed
    return make(groups, num_slabs=num_slabs, site=Site(order=order, alignment=tight))


@pytest.mark.parametrize("axes", list(permutations(AXES[:3])))
def test_one_tensor_per_layer_is_adopted_in_whatever_order_its_axes_stand(axes):
    groups = grouped([attention(f"l.{i}", heads=2, dim=2, tokens=2) for i in range(3)])
    memory = numbers(torch.zeros(3, 2, 2, 2, 4, dtype=torch.bfloat16))
    tensors = {f"l.{i}": memory[i] for i in range(3)}
    names = (*axes, "content")
    for order in (order for order in ORDERS if order.startswith("L")):
        layout = engine_layout(groups, order, 2)
        if order != f"L{''.join(LETTERS[axis] for axis in axes)}C":
            with pytest.raises(MemoryLayoutError, match="has a stride of"):
                Arena.adopt(layout, tensors, axes=names)
            continue
        with Arena.adopt(layout, tensors, axes=names) as arena:
            for name, tensor in tensors.items():
                standard = tensor.permute([names.index(a) for a in AXES])
                assert torch.equal(arena.tensor(name), standard)
                assert arena.tensor(name).data_ptr() == tensor.data_ptr()
                arena.tensor(name)[1, 0, 1, 2] = 77
                assert standard[1, 0, 1, 2] == 77


def test_one_buffer_for_all_layers_is_adopted_as_rows():
    groups = grouped([attention(f"l.{i}", heads=2, dim=2, tokens=4) for i in range(3)])
    buffer = numbers(torch.zeros(5, 3, 2, 4, 4, dtype=torch.bfloat16))
    tensors = {f"l.{i}": buffer[:, i] for i in range(3)}
    layout = engine_layout(groups, "BLHNC", 5)
    with Arena.adopt(layout, tensors, axes=AXES) as arena:
        assert arena.address == buffer.data_ptr()
        assert arena.regions == (Run(0, buffer.numel() * 2),)
        arena.zero(0, [3])
        assert not buffer[3].any()
        assert buffer[2].any()
        assert buffer[4].any()


def test_swapped_names_of_equal_axes_are_refused_against_a_layout():
    layers = [attention(f"l.{i}", heads=2, dim=2, tokens=2) for i in range(2)]
    layout = packed(grouped(layers), num_slabs=2)
    with Arena(layout) as arena:
        tensors = {name: arena.tensor(name) for name in layout.layers}
        for names in permutations(AXES[:3]):
            if names == AXES[:3]:
                continue
            with pytest.raises(MemoryLayoutError, match="has a stride of"):
                Arena.adopt(layout, tensors, axes=(*names, "content"))


# ── contradictions, with both numbers ─────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.view(torch.float16), "elements are torch.float16, the layout has"),
        (lambda t: t[:3], "axis 'block' has 3 elements, the layout 4"),
        (lambda t: t[:, :1], "axis 'head' has 1 elements, the layout 2"),
        (lambda t: t[..., :2], "axis 'content' has 2 elements, the layout 4"),
        (lambda t: t.contiguous(), "axis 'block' has a stride of 32 bytes, the layout"),
        (lambda t: t.transpose(1, 2), "axis 'head' has a stride of 8 bytes, the layout 16"),
    ],
)
def test_a_tensor_that_contradicts_the_layout_is_refused_with_both_numbers(change, message):
    layout = packed(grouped([attention("l", heads=2, dim=2, tokens=2)]), num_slabs=4)
    with Arena(layout) as arena:
        assert Arena.adopt(layout, {"l": arena.tensor("l")}, axes=AXES).nbytes == layout.nbytes
        with pytest.raises(MemoryLayoutError, match=message):
            Arena.adopt(layout, {"l": change(arena.tensor("l"))}, axes=AXES)


def test_tensors_that_lie_elsewhere_than_the_layout_says_are_refused():
    layout = packed(grouped([attention("a"), attention("b")]), num_slabs=4)
    with Arena(layout) as one, Arena(layout) as other:
        with pytest.raises(MemoryLayoutError, match="their bases are"):
            Arena.adopt(layout, {"a": one.tensor("a"), "b": other.tensor("b")}, axes=AXES)
        with pytest.raises(MemoryLayoutError, match=r"without a tensor: \['b'\]"):
            Arena.adopt(layout, {"a": one.tensor("a")}, axes=AXES)
        with pytest.raises(MemoryLayoutError, match="tensors are list"):
            Arena.adopt(layout, [one.tensor("a"), one.tensor("b")], axes=AXES)
        with pytest.raises(MemoryLayoutError, match="no axes are named for layer 'b', only for"):
            Arena.adopt(layout, {n: one.tensor(n) for n in "ab"}, axes={"a": AXES})


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (AXES[:3], "is said to have"),
        (("block", "head", "head", "content"), "is said to have"),
        (("head", "token", "content", "x"), "is said to have"),
        ((*AXES[:3], "dim"), "no axis 'dim'"),
    ],
)
def test_names_that_do_not_fit_the_tensor_are_refused(axes, message):
    layout = packed(grouped([attention("l")]), num_slabs=4)
    with Arena(layout) as arena, pytest.raises(MemoryLayoutError, match=message):
        Arena.adopt(layout, {"l": arena.tensor("l")}, axes=axes)


# ── what lies around it ───────────────────────────────────────────────────────────────


def test_rows_that_no_allocation_holds_from_end_to_end_are_refused():
    layout = engine_layout(grouped([attention("a"), attention("b")]), "BLHNC", 4)
    memory = bytearray(layout.nbytes)
    page = layout.row_bytes(0) // 2
    starts = {"a": 0, "b": page}
    tensors = {
        name: torch.frombuffer(
            memory, dtype=torch.bfloat16, offset=at, count=(layout.nbytes - page) // 2
        ).as_strided(layout.view(name).shape, [axis.stride // 2 for axis in layout.view(name).axes])
        for name, at in starts.items()
    }
    with pytest.raises(MemoryLayoutError, match="no tensor's memory holds"):
        Arena.adopt(layout, tensors, axes=AXES)


def apart(groups: Sequence[Group], tensors: dict[str, torch.Tensor]) -> Layout:
    """The layout of one group whose layers are in allocations of their own."""
    layout = engine_layout(groups, "LBHNC", len(next(iter(tensors.values()))))
    low = min(tensor.data_ptr() for tensor in tensors.values())
    (rows,) = layout.groups
    offsets = [tensors[layer.name].data_ptr() - low for layer in rows.group.layers]
    places = tuple(
        tuple(replace(place, offset=offset) for place in page)
        for page, offset in zip(rows.placements, offsets, strict=True)
    )
    nbytes = max(offsets) + next(iter(tensors.values())).nbytes
    return replace(layout, groups=(replace(rows, placements=places),), nbytes=nbytes)


def test_nothing_between_two_allocations_is_ever_read_or_written():
    groups = grouped([attention("a"), attention("b")])
    memory = torch.full((3, 4, 2, 2, 4), 7.0, dtype=torch.bfloat16)
    tensors = {"a": memory[0].clone(), "b": memory[1].clone()}
    other = Arena(packed(groups, num_slabs=4))
    with Arena.adopt(apart(groups, tensors), tensors, axes=AXES) as arena:
        assert len(arena.regions) == 2
        first, second = arena.regions
        between = first.end
        if second.offset > first.end:
            moves = Copies(np.array([between]), np.array([0]), np.array([1]))
            with pytest.raises(CopyError, match="source bytes"):
                copy(arena, other, moves)
        across = Copies(np.array([first.end - 1]), np.array([0]), np.array([2]))
        with pytest.raises(CopyError, match="source bytes"):
            copy(arena, other, across)


def test_adopted_memory_moves_into_a_packed_arena_and_keeps_its_digest():
    groups = grouped([attention(f"l.{i}", heads=2, dim=4, tokens=2) for i in range(3)])
    memory = numbers(torch.zeros(3, 6, 2, 2, 8, dtype=torch.bfloat16))
    tensors = {f"l.{i}": memory[i] for i in range(3)}
    axes = ("block", "token", "head", "content")
    theirs, mine = engine_layout(groups, "LBNHC", 6), packed(groups, num_slabs=8)
    here, there = {0: Blocks.first([4, 1, 2])}, {0: Blocks.first([7, 3, 5])}
    with Arena.adopt(theirs, tensors, axes=axes) as engine, Arena(mine) as arena:
        copy(engine, arena, plan_route(theirs, mine).copies(here, there, 5)).wait()
        assert digest(engine, here, 5) == digest(arena, there, 5)
        assert torch.equal(arena.tensor("l.2")[7], tensors["l.2"][4].transpose(0, 1))


def test_an_adopted_arena_keeps_the_engines_memory_alive():
    tensors = {"l": torch.full((4, 2, 2, 4), 3.0, dtype=torch.bfloat16)}
    layout = engine_layout(grouped([attention("l")]), "LBHNC", 4)
    arena = Arena.adopt(layout, tensors, axes=AXES)
    tensors.clear()
    junk = [torch.zeros(4, 2, 2, 4, dtype=torch.bfloat16) for _ in range(64)]
    assert (arena.tensor("l") == 3.0).all()
    assert junk


def test_pages_of_several_sections_are_adopted_by_their_bytes():
    spec = attention("l.0", heads=2, dim=4, tokens=3, value_section=1, align=64)
    memory = torch.zeros(5, 128, dtype=torch.uint8)
    layout = engine_layout(grouped([spec]), "BLHNC", 5)
    arena = Arena.adopt(layout, {"l.0": memory}, axes=("block", "content"))
    arena.field("l.0", "v")[4, 1, 2, 3] = 1.5
    last = memory[4, 48:96].view(torch.bfloat16)
    assert last[-1] == 1.5
    assert memory.count_nonzero() == 2
