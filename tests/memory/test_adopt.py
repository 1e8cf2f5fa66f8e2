"""Engine memory: taken as it is when it keeps the laws, refused with both numbers when not."""

from itertools import permutations

import numpy as np
import pytest
import torch

from kvstow.errors import CopyError, LayoutError, MemoryLayoutError
from kvstow.memory.adopt import adopted_layout
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.memory.digest import digest
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.plan.view import Run
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.route import plan_route
from planning import attention, recurrent

AXES = ("block", "head", "token", "content")


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Give every element its own value; bf16 holds small whole numbers exactly."""
    tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape).remainder(199))
    return tensor


@pytest.mark.parametrize("axes", list(permutations(AXES[:3])))
def test_one_tensor_per_layer_is_adopted_in_whatever_order_its_axes_stand(axes):
    groups = grouped([attention(f"l.{i}", heads=2, dim=2, tokens=2) for i in range(3)])
    shape = {"block": 2, "head": 2, "token": 2}
    tensors = {
        f"l.{i}": numbers(torch.zeros([*(shape[a] for a in axes), 4], dtype=torch.bfloat16))
        for i in range(3)
    }
    letters = "".join({"block": "B", "head": "H", "token": "N"}[a] for a in axes)
    order = f"L{letters}C"
    names = (*axes, "content")
    if order not in ORDERS:
        with pytest.raises((MemoryLayoutError, LayoutError)):
            adopted_layout(groups, tensors, axes=names, order="LBHNC")
        return
    layout = adopted_layout(groups, tensors, axes=names, order=order)
    with Arena.adopt(layout, tensors, axes=names) as arena:
        for name, tensor in tensors.items():
            standard = tensor.permute([names.index(a) for a in AXES])
            assert torch.equal(arena.tensor(name), standard)
            assert arena.tensor(name).data_ptr() == tensor.data_ptr()
            arena.tensor(name)[1, 0, 1, 2] = 77
            assert standard[1, 0, 1, 2] == 77
        assert len(arena.regions) == 3


def test_one_buffer_for_all_layers_is_adopted_as_rows():
    groups = grouped([attention(f"l.{i}", heads=2, dim=2, tokens=4) for i in range(3)])
    buffer = numbers(torch.zeros(5, 3, 2, 4, 4, dtype=torch.bfloat16))
    tensors = {f"l.{i}": buffer[:, i] for i in range(3)}
    layout = adopted_layout(groups, tensors, axes=AXES, order="BLHNC")
    assert len(layout.footprints[0].strips) == 1
    assert layout.row_bytes(0) == 3 * 2 * 4 * 4 * 2
    with Arena.adopt(layout, tensors, axes=AXES) as arena:
        assert arena.address == buffer.data_ptr()
        assert arena.regions == (Run(0, buffer.numel() * 2),)
        arena.zero(0, [3])
        assert not buffer[3].any()
        assert buffer[2].any()
        assert buffer[4].any()


def test_memory_laid_out_by_a_plan_is_adopted_under_that_plan():
    groups = grouped([attention("a", heads=2, tokens=4), attention("b", retention=Window(4))])
    layout = packed(groups, num_slabs=5)
    with Arena(layout) as mine:
        tensors = {name: mine.tensor(name) for name in layout.layers}
        with Arena.adopt(layout, tensors, axes=AXES) as arena:
            assert arena.address == mine.address
            arena.tensor("b")[2].fill_(4.0)
            assert (mine.tensor("b")[2] == 4.0).all()


def test_groups_of_an_engine_that_share_block_ids_keep_the_sharing_law():
    groups = grouped([attention("a"), attention("b", retention=Window(4))])
    buffer = torch.zeros(6, 2, 2, 4, dtype=torch.bfloat16)
    tensors = {"a": buffer, "b": buffer}
    layout = adopted_layout(groups, tensors, axes=AXES, order="LBHNC")
    assert layout.sharing == ((0, 1),)
    same_group = grouped([attention("a"), attention("b")])
    with pytest.raises(LayoutError, match="overlap"):
        adopted_layout(same_group, tensors, axes=AXES, order="LBHNC")


def test_keys_and_values_in_tensors_of_their_own_are_two_layers():
    def half(name: str) -> LayerSpec:
        return LayerSpec(
            name=name,
            retention=Full(),
            block_tokens=2,
            states=2,
            heads=Extent.whole("head", 2),
            fields=(Field(name[-1], DType.BFLOAT16, (Extent.whole("content", 4),)),),
        )

    both = numbers(torch.zeros(2, 6, 2, 2, 4, dtype=torch.bfloat16))  # k and v outermost
    tensors = {"l.k": both[0], "l.v": both[1]}
    axes = ("block", "token", "head", "content")
    groups = grouped([half("l.k"), half("l.v")])
    layout = adopted_layout(groups, tensors, axes=axes, order="LBNHC")
    with Arena.adopt(layout, tensors, axes=axes) as arena:
        assert torch.equal(arena.field("l.v", "v"), both[1].transpose(1, 2))


def test_fields_of_one_page_may_come_as_tensors_of_their_own():
    spec = recurrent("m", channels=4, taps=2, heads=2)
    buffer = torch.zeros(4, spec.page_bytes, dtype=torch.uint8)
    conv = buffer[:, :16].view(torch.bfloat16).unflatten(1, (4, 2))
    ssm = buffer[:, 16:].view(torch.float32).unflatten(1, (2, 2))
    tensors = {("m", "conv"): conv, ("m", "ssm"): ssm}
    axes = {("m", "conv"): ("block", "channel", "tap"), ("m", "ssm"): ("block", "head", "state")}
    groups = grouped([spec])
    with pytest.raises(MemoryLayoutError, match="axis 'head'"):
        adopted_layout(groups, tensors, axes=axes, order="BLHNC")
    inner = LayerSpec(
        name="m",
        retention=spec.retention,
        block_tokens=8,
        states=1,
        heads=spec.heads,
        fields=(
            spec.fields[0],
            Field("ssm", DType.FLOAT32, (Extent.whole("row", 2), Extent.whole("state", 2))),
        ),
    )
    axes["m", "ssm"] = ("block", "row", "state")
    layout = adopted_layout(grouped([inner]), tensors, axes=axes, order="BLHNC")
    with Arena.adopt(layout, tensors, axes=axes) as arena:
        arena.field("m", "ssm")[2, 0, 0, 1, 1] = 5.0
        assert ssm[2, 1, 1] == 5.0
    swapped = {("m", "conv"): conv, ("m", "ssm"): ssm.transpose(1, 2)}
    with pytest.raises(MemoryLayoutError, match="stride of 4 bytes, the layout 8"):
        Arena.adopt(layout, swapped, axes=axes)


# ── never guessed ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_wrong_order_is_refused_even_when_all_sizes_are_equal(size):
    groups = grouped([attention(f"l.{i}", heads=size, dim=size, tokens=size) for i in range(2)])
    shape = (max(2, size), size, size, 2 * size)
    tensors = {f"l.{i}": torch.zeros(shape, dtype=torch.bfloat16) for i in range(2)}
    layout = adopted_layout(groups, tensors, axes=AXES, order="LBHNC")
    assert layout.order == "LBHNC"
    if size > 1:
        for order in ("LBNHC", "LHBNC"):
            with pytest.raises((MemoryLayoutError, LayoutError)):
                adopted_layout(groups, tensors, axes=AXES, order=order)
    with pytest.raises((MemoryLayoutError, LayoutError)):
        adopted_layout(groups, tensors, axes=AXES, order="BLHNC")


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


def test_names_that_do_not_fit_the_tensor_are_refused():
    groups = grouped([attention("l")])
    tensor = torch.zeros(4, 2, 2, 4, dtype=torch.bfloat16)
    for axes in (
        AXES[:3],
        (*AXES, "more"),
        ("block", "head", "head", "content"),
        ("head", "token", "content", "x"),
    ):
        with pytest.raises(MemoryLayoutError, match="is said to have"):
            adopted_layout(groups, {"l": tensor}, axes=axes, order="LBHNC")
    with pytest.raises(MemoryLayoutError, match="no axis 'dim'"):
        adopted_layout(groups, {"l": tensor}, axes=(*AXES[:3], "dim"), order="LBHNC")


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
        with pytest.raises(MemoryLayoutError, match="no tensors"):
            Arena.adopt(layout, {}, axes=AXES)


def test_different_numbers_of_blocks_are_refused():
    tensors = {
        "a": torch.zeros(4, 2, 2, 4, dtype=torch.bfloat16),
        "b": torch.zeros(5, 2, 2, 4, dtype=torch.bfloat16),
    }
    with pytest.raises(MemoryLayoutError, match="has 4 slabs, layer 'b' has 5"):
        adopted_layout(grouped([attention("a"), attention("b")]), tensors, axes=AXES, order="LBHNC")


# ── what lies around it ───────────────────────────────────────────────────────────────


def test_a_layer_that_is_not_ours_between_two_that_are_is_refused_or_declared():
    groups = grouped([attention("a"), attention("c")])
    buffer = torch.zeros(4, 3, 2, 2, 4, dtype=torch.bfloat16)
    tensors = {"a": buffer[:, 0], "c": buffer[:, 2]}
    with pytest.raises(MemoryLayoutError, match="rows of 96 bytes hold pages of 64"):
        adopted_layout(groups, tensors, axes=AXES, order="BLHNC")
    layout = adopted_layout(groups, tensors, axes=AXES, order="BLHNC", padding="ours")
    assert layout.row_bytes(0) == 96


def test_the_storage_may_be_longer_than_what_the_plan_counts():
    groups = grouped([attention("l")])
    storage = torch.full((4096,), 7.0, dtype=torch.bfloat16)
    tensor = storage[64 : 64 + 4 * 16].view(4, 2, 2, 4)
    layout = adopted_layout(groups, {"l": tensor}, axes=AXES, order="LBHNC")
    assert layout.nbytes == tensor.numel() * 2
    assert layout.num_blocks(0) == 4
    with Arena.adopt(layout, {"l": tensor}, axes=AXES) as arena:
        arena.zero(0, range(4))
        assert not tensor.any()
        assert int((storage == 7.0).sum()) == 4096 - 64


def test_layers_that_start_at_one_address_register_the_longer_of_them():
    buffer = torch.zeros(8, 2, 2, 4, dtype=torch.bfloat16)
    short = attention("a", heads=2, dim=2, tokens=2)
    longer = attention("b", heads=2, dim=2, tokens=4, retention=Window(4))
    tensors = {"a": buffer, "b": buffer.view(4, 2, 4, 4)}
    groups = grouped([short, longer])
    layout = adopted_layout(groups, tensors, axes=AXES, order="LBHNC", rows_per_slab=(2, 1))
    with Arena.adopt(layout, tensors, axes=AXES) as arena:
        assert arena.regions == (Run(0, 256),)
    for reverse in (False, True):
        parts = [("a", buffer.view(4, 2, 4, 4)[:, :, :2]), ("b", buffer.view(4, 2, 4, 4))]
        shorter = dict(reversed(parts) if reverse else parts)
        layout = adopted_layout(groups, shorter, axes=AXES, order="LBHNC", padding="ours")
        with Arena.adopt(layout, shorter, axes=AXES) as arena:
            assert arena.regions == (Run(0, 256),)


def test_nothing_between_two_allocations_is_ever_read_or_written():
    groups = grouped([attention("a"), attention("b")])
    apart = torch.full((3, 4, 2, 2, 4), 7.0, dtype=torch.bfloat16)
    tensors = {"a": apart[0].clone(), "b": apart[1].clone()}
    layout = adopted_layout(groups, tensors, axes=AXES, order="LBHNC")
    other = Arena(packed(groups, num_slabs=4))
    with Arena.adopt(layout, tensors, axes=AXES) as arena:
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
    tensors = {
        f"l.{i}": numbers(torch.zeros(6, 2, 2, 8, dtype=torch.bfloat16)) * (i + 1) for i in range(3)
    }
    axes = ("block", "token", "head", "content")
    theirs = adopted_layout(groups, tensors, axes=axes, order="LBNHC")
    mine = packed(groups, num_slabs=8)
    here, there = {0: Blocks.first([4, 1, 2])}, {0: Blocks.first([7, 3, 5])}
    with Arena.adopt(theirs, tensors, axes=axes) as engine, Arena(mine) as arena:
        copy(engine, arena, plan_route(theirs, mine).copies(here, there, 5)).wait()
        assert digest(engine, here, 5) == digest(arena, there, 5)
        assert torch.equal(arena.tensor("l.2")[7], tensors["l.2"][4].transpose(0, 1))


def test_an_adopted_arena_keeps_the_engines_memory_alive():
    groups = grouped([attention("l")])
    tensors = {"l": torch.full((4, 2, 2, 4), 3.0, dtype=torch.bfloat16)}
    layout = adopted_layout(groups, tensors, axes=AXES, order="LBHNC")
    arena = Arena.adopt(layout, tensors, axes=AXES)
    tensors.clear()
    junk = [torch.zeros(4, 2, 2, 4, dtype=torch.bfloat16) for _ in range(64)]
    assert (arena.tensor("l") == 3.0).all()
    assert junk


# ── what the caller says ──────────────────────────────────────────────────────────────


def test_what_is_said_of_tensors_is_checked_before_anything_is_made_of_it():
    groups = grouped([attention("a"), attention("b", retention=Window(4))])
    tensors = {name: torch.zeros(6, 2, 2, 4, dtype=torch.bfloat16) for name in "ab"}

    def adopt(**said):
        return adopted_layout(groups, tensors, **({"axes": AXES, "order": "LBHNC"} | said))

    with pytest.raises(MemoryLayoutError, match="no axes are named for layer 'b', only for"):
        adopt(axes={"a": AXES})
    with pytest.raises(MemoryLayoutError, match="2 groups, rows_per_slab has 3 numbers"):
        adopt(rows_per_slab=(1, 1, 1))
    with pytest.raises(MemoryLayoutError, match="'HND' is no order"):
        adopt(order="HND")
    with pytest.raises(MemoryLayoutError, match="rows_per_slab 0"):
        adopt(rows_per_slab=(1, 0))
    with pytest.raises(MemoryLayoutError, match=r"tensors are list, .*\n\nhint: "):
        adopted_layout(groups, list(tensors.values()), axes=AXES, order="LBHNC")


@pytest.mark.parametrize(
    ("shape", "axes", "dtype", "message"),
    [
        ((6, 2, 2, 4), AXES, torch.float32, "elements are torch.float32, the layout has"),
        ((6, 2, 3, 4), AXES, torch.bfloat16, "axis 'token' has 3 elements, the layout 2"),
        ((2, 6, 2, 2, 2), ("kv", *AXES), torch.bfloat16, "there is no axis 'kv' among"),
    ],
)
def test_what_a_layer_cannot_have_is_said_before_its_strides(shape, axes, dtype, message):
    """Strides of wrong elements or axes were compared first, and told nobody what was wrong."""
    groups = grouped([attention("l", heads=2, dim=2, tokens=2)])
    with pytest.raises(MemoryLayoutError, match=message):
        adopted_layout(groups, {"l": torch.zeros(shape, dtype=dtype)}, axes=axes, order="LBHNC")


@pytest.mark.parametrize("whole", [True, False])
def test_pages_of_several_sections_are_adopted_by_their_bytes_or_their_fields(whole):
    spec = attention("l.0", heads=2, dim=4, tokens=3, value_section=1, align=64)
    memory = torch.zeros(5, 128, dtype=torch.uint8)
    if whole:
        tensors, axes = {"l.0": memory}, ("block", "content")
    else:
        parts = memory[:, :48], memory[:, 48:96]
        tensors = {
            ("l.0", name): part.unflatten(1, (2, 3, 8)).view(torch.bfloat16)
            for name, part in zip(("k", "v"), parts, strict=True)
        }
        axes = ("block", "head", "token", "content")
    layout = adopted_layout(grouped([spec]), tensors, axes=axes, order="BLHNC", padding="ours")
    arena = Arena.adopt(layout, tensors, axes=axes)
    arena.field("l.0", "v")[4, 1, 2, 3] = 1.5
    last = memory[4, 48:96].view(torch.bfloat16)
    assert last[-1] == 1.5
    assert memory.count_nonzero() == 2
