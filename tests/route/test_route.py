"""Routes by example: what is refused, what is joined, what is left alone."""

from dataclasses import replace

import numpy as np
import pytest

from kvstow.errors import BlockError, RouteError, SpecError
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout, PlacedGroup, Placement
from kvstow.plan.pack import Alignment
from kvstow.plan.retention import State, Window
from kvstow.plan.sizing.plan import plan_model
from kvstow.route.blocks import Blocks
from kvstow.route.price import price
from kvstow.route.route import plan_route
from planning import attention, laid_out, recurrent


def first(*ids) -> dict[int, Blocks]:
    return {0: Blocks.first(ids)}


def triples(moves) -> list[tuple[int, int, int]]:
    columns = (moves.source.tolist(), moves.destination.tolist(), moves.nbytes.tolist())
    return list(zip(*columns, strict=True))


TWO = (attention("layers.0"), attention("layers.1"))  # 2 heads × 2 tokens × 8 bytes a page
ROW = 64


class TestJoining:
    def test_padding_between_rows_that_another_group_uses_is_not_run_over(self):
        """Two groups interleaved, 8 bytes each: legal, though no planner does it."""
        spec = attention("layers.0", heads=1, tokens=1)
        other = attention("layers.1", heads=1, tokens=1, retention=Window(4))
        layout = Layout(
            model="m",
            order="BLHNC",
            num_slabs=8,
            nbytes=8 * 16,
            groups=tuple(
                PlacedGroup(
                    group=Group(name=name, layers=(layer,)),
                    rows_per_slab=1,
                    placements=((Placement(offset, 16, 8, 8),),),
                )
                for name, layer, offset in (("a", spec, 0), ("b", other, 8))
            ),
            base_align=2,
        )
        lists = {0: Blocks.first([2, 3]), 1: Blocks.first([5, 6])}
        moves = plan_route(layout, layout).copies(lists, lists, 2)
        assert triples(moves) == [(32, 32, 8), (48, 48, 8), (88, 88, 8), (104, 104, 8)]

    def test_what_lies_after_the_last_block_is_not_its_padding(self):
        """Pages of the second layer start where the first one's last row would be padded."""
        layers = tuple(attention(f"layers.{i}", heads=1, tokens=1) for i in range(2))
        places = (Placement(0, 64, 8, 8),), (Placement(96, 8, 8, 8),)
        rows = PlacedGroup(group=Group(name="a", layers=layers), rows_per_slab=1, placements=places)
        layout = Layout(
            model="m", order="LBHNC", num_slabs=2, nbytes=112, groups=(rows,), base_align=2
        )
        moves = plan_route(layout, layout).copies(first(1), first(1), 1)
        assert triples(moves) == [(64, 64, 8), (104, 104, 8)]

    def test_what_lies_behind_the_last_row_does_not_part_the_rows_before_it(self):
        layers = tuple(attention(f"layers.{i}", heads=1, tokens=1) for i in range(2))
        places = (Placement(0, 64, 8, 8),), (Placement(136, 8, 8, 8),)
        rows = PlacedGroup(group=Group(name="a", layers=layers), rows_per_slab=1, placements=places)
        layout = Layout(
            model="m", order="LBHNC", num_slabs=3, nbytes=160, groups=(rows,), base_align=2
        )
        moves = plan_route(layout, layout).copies(first(1, 2), first(1, 2), 2)
        assert triples(moves) == [(64, 64, 72), (144, 144, 16)]

    def test_padding_on_one_side_is_not_run_over_where_the_other_side_holds_a_layer(self):
        layers = [attention(f"layers.{i}", heads=1) for i in range(3)]  # pages of 16 bytes
        stage = laid_out(layers[0], layers[2], pp=(0, 2), alignment=Alignment(page=32, row=1))
        whole = laid_out(*layers)
        assert [stage.layers[f"layers.{i}"][2][0].offset for i in (0, 2)] == [0, 32]
        for here, there in ((stage, whole), (whole, stage)):
            moves = plan_route(here, there).copies(first(2), first(3), 2)
            assert moves.nbytes.tolist() == [16, 16]

    def test_the_last_tokens_travel_with_their_whole_block(self):
        layout = laid_out(*TWO)
        moves = plan_route(layout, layout).copies(first(2), first(7), 1)
        assert triples(moves) == [(2 * ROW, 7 * ROW, ROW)]

    @pytest.mark.parametrize(("here", "there"), [(100, 100), (100, 200), (200, 100)])
    def test_pages_travel_with_the_padding_between_them_where_rows_are_equal_inside(
        self, here, there
    ):
        one, other = (
            laid_out(*TWO, alignment=Alignment(page=40, row=row, base=1000))
            for row in (here, there)
        )
        moves = plan_route(one, other).copies(first(2, 3), first(7, 9), 4)
        row = 40 + 32
        strides = one.row_stride(0), other.row_stride(0)
        assert triples(moves) == [
            (2 * strides[0], 7 * strides[1], row), (3 * strides[0], 9 * strides[1], row)
        ]  # fmt: skip

    def test_moves_of_two_groups_are_never_joined(self):
        """Every failure can be told by its group."""
        layers = (attention("layers.0"), attention("layers.1", retention=Window(2)))
        layout = laid_out(*layers)
        assert [rows.rows_per_slab for rows in layout.groups] == [1, 1]
        lists = {0: Blocks.first([2]), 1: Blocks.first([3])}
        assert len(plan_route(layout, layout).copies(lists, lists, 2)) == 2


class TestRetentions:
    def test_summaries_with_different_checkpoint_distances_meet(self):
        spec = recurrent("layers.0")
        here, there = laid_out(spec), laid_out(replace(spec, block_tokens=48, retention=State()))
        assert len(plan_route(here, there).copies(first(2), first(3), 10)) == 1

    def test_more_tokens_than_the_blocks_of_either_side_hold_are_refused(self):
        way = plan_route(laid_out(attention("layers.0", tokens=4)), laid_out(attention("layers.0")))
        assert way.copies(first(2), first(3, 4), 4).total == 64
        for ours, theirs, side in (
            (first(2), first(3, 4, 5), "source group 'full': .* logical blocks 1 "),
            (first(2, 3), first(3, 4), "destination group 'full': .* logical blocks 2 "),
            (first(2), first(3, 4), "source group 'full': .* logical blocks 1 "),
        ):
            with pytest.raises(RouteError, match=side):
                way.copies(ours, theirs, 5)

    def test_a_group_of_which_the_destination_lists_nothing_is_not_wanted(self):
        layout = laid_out(*TWO)
        assert len(plan_route(layout, layout).copies(first(2, 3), first(), 4)) == 0

    @pytest.mark.parametrize("tokens", [1, 2, 4])
    def test_fewer_tokens_than_the_source_has_need_blocks_that_its_window_still_holds(self, tokens):
        """Of 20 tokens a window of 4 keeps 17 to 19, and token 18 looks back to 15."""
        window = attention("layers.1", tokens=tokens, retention=Window(4))
        way = plan_route(
            *[laid_out(attention("layers.0", tokens=tokens), window, num_slabs=60)] * 2
        )

        def held(first_token: int, num_tokens: int) -> dict[int, Blocks]:
            every = np.arange(-(-num_tokens // tokens))
            kept = every[every >= first_token // tokens]
            return {0: Blocks(every + 2, every), 1: Blocks(kept + 30, kept)}

        assert way.copies(held(15, 20), held(15, 18), 18).total
        missing = np.arange(15 // tokens, 17 // tokens)
        for ours, theirs in (((17, 20), (15, 18)), ((15, 20), (17, 18)), ((17, 20), (17, 20))):
            if not len(missing):
                assert way.copies(held(*ours), held(*theirs), 18).total
                continue
            with pytest.raises(RouteError, match=f"'window4': .* blocks {missing[0]}"):
                way.copies(held(*ours), held(*theirs), 18)


class TestRefusals:
    def test_ids_outside_the_group_null_rows_and_ids_named_twice_are_refused(self):
        layout = laid_out(*TWO)
        way = plan_route(layout, layout)
        wrong = {
            (12, 13): "12, 13 are not among",
            (0, 3): "blocks 0 are not among",
            (-1, 3): "blocks -1 are not among",
            (3, 3): "blocks 3 are named twice",
        }
        for ids, text in wrong.items():
            with pytest.raises(BlockError, match=text):
                way.copies(first(2, 3), first(*ids), 4)
            with pytest.raises(BlockError, match=text):
                way.copies(first(*ids), first(2, 3), 4)

    def test_a_group_without_a_list_is_refused(self):
        layout = laid_out(*TWO)
        with pytest.raises(RouteError, match="destination group 0"):
            plan_route(layout, layout).copies(first(2), {}, 2)

    def test_tokens_that_are_no_interval_are_refused(self):
        layout = laid_out(*TWO)
        with pytest.raises(RouteError, match=r"tokens \[5, 4\)"):
            plan_route(layout, layout).copies(first(2), first(3), 4, start_token=5)


class TestPrice:
    def test_lanes_do_not_depend_on_the_number_of_blocks(self):
        small, large = (laid_out(*TWO, num_slabs=n, order="LBHNC") for n in (4, 4000))
        assert len(plan_route(small, small).lanes[0]) == len(plan_route(large, large).lanes[0]) == 2

    def test_blocks_of_unequal_size_are_priced_by_their_period(self):
        here = laid_out(attention("layers.0", tokens=4, heads=1))
        there = laid_out(attention("layers.0", tokens=6, heads=1))
        cost = price(plan_route(here, there).pairs)
        assert (cost.lanes, cost.copies, cost.nbytes) == (4, 2, 48)
        assert (cost.min_copy_bytes, cost.max_copy_bytes) == (16, 32)


def test_a_plan_is_taken_where_a_layout_is_wanted_and_a_name_is_not():
    plan = plan_model("gemma-3-270m", num_slabs=9)
    assert plan_route(plan, plan).source is plan.layout
    with pytest.raises(SpecError, match=r"a Layout or a Plan, got str\n\nhint: .*plan_model"):
        plan_route("llama", "llama")  # pyright: ignore[reportArgumentType]
