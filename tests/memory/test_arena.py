"""Arenas: one allocation, views that never copy, blocks filled exactly."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import ArenaError, BlockError, SpecError
from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Alignment, Site, packed
from kvstow.plan.retention import Full, Window
from kvstow.plan.sizing.plan import plan_model
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from planning import attention, block_bytes, layouts, recurrent


def two_groups(order: str = "BLHNC", **alignment: int) -> Layout:
    layers = [attention(f"layers.{i}", heads=2, dim=4, tokens=2) for i in range(2)]
    layers.append(
        attention("layers.2", heads=2, dim=2, tokens=4, retention=Window(4), dtype=DType.FLOAT32)
    )
    site = Site(order=order, alignment=Alignment(**alignment))
    return packed(grouped(layers), num_slabs=4, site=site)


def test_an_arena_of_a_plan_has_its_layout():
    plan = plan_model("gemma-3-270m", num_slabs=2)
    with Arena(plan) as arena:
        assert arena.layout is plan.layout


def test_a_closed_arena_hands_out_nothing_more():
    arena = Arena(two_groups())
    arena.close()
    with pytest.raises(ArenaError, match="closed"):
        arena.tensor("layers.0")


# ── views: facts §4, 8 to 15 ──────────────────────────────────────────────────────────


@given(layouts())
def test_every_view_shares_the_backing_storage_and_writes_go_both_ways(layout):
    with Arena(layout) as arena:
        storage = arena.bytes.untyped_storage().data_ptr()
        for layer, (_, spec, _) in layout.layers.items():
            whole = arena.tensor(layer) if len(spec.sections) == 1 else arena.bytes
            views = [whole, *(arena.field(layer, f.name) for f in spec.fields)]
            for view in views:
                assert view.untyped_storage().data_ptr() == storage
            arena.bytes.fill_(0x11)
            views[-1].view(torch.uint8).fill_(0x22)
            assert (views[0].view(torch.uint8) == 0x22).any()
            arena.bytes.fill_(0x33)
            assert (views[-1].view(torch.uint8) == 0x33).all()


@pytest.mark.parametrize("order", ORDERS)
def test_axes_of_one_element_keep_the_stride_they_would_have_were_they_longer(order):
    def strides(heads: int, tokens: int) -> dict[str, int]:
        layer = attention("l", heads=heads, dim=8, tokens=tokens)
        layout = packed(grouped([layer]), num_slabs=3, site=Site(order=order))
        with Arena(layout) as arena:
            found = [s * arena.tensor("l").element_size() for s in arena.tensor("l").stride()]
        return dict(zip(("block", "head", "token", "content"), found, strict=True))

    for heads, tokens in ((1, 4), (4, 1), (1, 1)):
        found = strides(heads, tokens)
        assert min(found["block"], found["head"], found["token"]) >= 16
        cell = 32
        outer = order.index("H") < order.index("N")
        assert found["token" if outer else "head"] == cell
        if order != "LHBNC":
            assert found["head" if outer else "token"] >= cell * (tokens if outer else heads)


def scaled(name: str) -> LayerSpec:
    content = (Extent.whole("content", 128),)
    scale = (Extent.whole("scale", 1),)
    return LayerSpec(
        name=name,
        retention=Full(),
        block_tokens=2,
        states=2,
        heads=Extent.whole("head", 2),
        fields=(
            Field("k", DType.FLOAT8_E4M3, content),
            Field("v", DType.FLOAT8_E4M3, content),
            Field("k_scale", DType.FLOAT32, scale),
            Field("v_scale", DType.FLOAT32, scale),
        ),
    )


def test_pages_with_inline_scales_include_the_scales():
    layout = packed(grouped([scaled("l")]), num_slabs=3)
    with Arena(layout) as arena:
        assert arena.tensor("l").shape == (3, 2, 2, 264)
        assert arena.tensor("l").dtype == torch.uint8
        assert arena.field("l", "k_scale").dtype == torch.float32
        arena.field("l", "v_scale")[1].fill_(-1.0)
        rows = b"".join(bytes(arena.bytes[r.offset : r.end].tolist()) for r in layout.runs(0, 1))
        assert rows.count(np.float32(-1.0).tobytes()) == 4


def test_views_come_out_as_numpy_and_through_dlpack_over_the_same_memory():
    kinds = [
        DType.FLOAT64,
        DType.FLOAT32,
        DType.FLOAT16,
        DType.BFLOAT16,
        DType.FLOAT8_E4M3,
        DType.FLOAT8_E5M2,
        DType.INT32,
        DType.INT8,
        DType.UINT8,
        DType.INT4,
        DType.FLOAT4_E2M1,
    ]
    layers = [attention(f"l.{i}", dim=4, dtype=kind) for i, kind in enumerate(kinds)]
    layout = packed(grouped(layers), num_slabs=2)
    with Arena(layout) as arena:
        for i, kind in enumerate(kinds):
            array = arena.numpy(f"l.{i}", "v")
            assert array.ctypes.data == arena.field(f"l.{i}", "v").data_ptr()
            assert array.itemsize == kind.unit
            assert array.strides == layout.field(f"l.{i}", "v").strides
            array.view(np.uint8 if kind.unit == 1 else f"u{kind.unit}")[1, 1, 1, 0] = 5
            raw = arena.field(f"l.{i}", "v").view(torch.uint8)
            assert int(raw[1, 1, 1, 0]) == 5
        there = np.from_dlpack(arena.field("l.1", "k"))
        there[1] = 2.5
        assert (arena.field("l.1", "k")[1] == 2.5).all()


def test_a_recurrent_page_has_a_view_per_field_with_its_own_axes():
    layout = packed(grouped([recurrent("m", channels=3, taps=2, heads=2)]), num_slabs=3)
    with Arena(layout) as arena:
        assert arena.field("m", "conv").shape == (3, 1, 1, 3, 2)
        assert arena.field("m", "conv").dtype == torch.bfloat16
        assert arena.field("m", "ssm").shape == (3, 1, 1, 2, 2)
        assert arena.tensor("m").dtype == torch.uint8


def test_unknown_layers_and_fields_are_refused():
    with Arena(two_groups()) as arena:
        with pytest.raises(SpecError, match="no layer"):
            arena.tensor("layers.9")
        with pytest.raises(SpecError, match="no field"):
            arena.field("layers.0", "q")


# ── filling: facts §4, 16 and 17 ──────────────────────────────────────────────────────


@given(layouts(), st.data())
def test_zeroing_blocks_changes_exactly_the_owners_bytes(layout, data):
    group = data.draw(st.integers(0, len(layout.groups) - 1))
    count = layout.num_blocks(group)
    ids = data.draw(st.lists(st.integers(0, count - 1), max_size=4))
    with Arena(layout) as arena:
        arena.bytes.fill_(0xA5)
        arena.zero(group, ids)
        memory = arena.bytes.numpy()
        for block in ids:
            assert not memory[block_bytes(layout, group, block)].any()
        own = np.zeros(layout.nbytes, np.bool_)
        for block in ids:
            for run in layout.runs(group, block):
                own[run.offset : run.end] = True
        assert (memory[~own] == 0xA5).all()
        for g, rows in enumerate(layout.groups):
            slabs = {block // layout.groups[group].rows_per_slab for block in ids}
            together = any({g, group} <= set(members) for members in layout.sharing)
            for block in range(layout.num_blocks(g)):
                mine = block in ids if g == group else block // rows.rows_per_slab in slabs
                if not (mine and (g == group or together)):
                    assert (memory[block_bytes(layout, g, block)] == 0xA5).all()


@pytest.mark.parametrize(
    "kind",
    [
        DType.FLOAT64,
        DType.FLOAT32,
        DType.FLOAT16,
        DType.BFLOAT16,
        DType.FLOAT8_E4M3,
        DType.FLOAT8_E5M2,
    ],
)
def test_poison_is_not_a_number_in_every_floating_type(kind):
    layout = packed(grouped([attention("l", dtype=kind)]), num_slabs=2)
    with Arena(layout) as arena:
        arena.poison(0, [1])
        assert arena.tensor("l")[1].float().isnan().all()
        assert not arena.tensor("l")[0].float().isnan().any()


def test_ids_outside_the_group_are_refused_and_nothing_is_filled():
    layout = two_groups()
    with Arena(layout) as arena:
        arena.bytes.fill_(3)
        for bad in ([-1], [1, layout.num_blocks(0)], [1 << 40]):
            with pytest.raises(BlockError, match="are not in"):
                arena.zero(0, bad)
        with pytest.raises(BlockError, match="no group 2"):
            arena.zero(2, [1])
        assert (arena.bytes == 3).all()
