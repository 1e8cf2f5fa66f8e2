"""Routes by example: what is refused, what is joined, what is left alone."""

from dataclasses import replace

import numpy as np
import pytest

from kvstow.errors import BlockError, RouteError, SpecError
from kvstow.plan.group import Group, grouped
from kvstow.plan.layout import Layout, PlacedGroup, Placement
from kvstow.plan.pack import Alignment, Site, packed
from kvstow.plan.retention import Chunk, Full, State, Window
from kvstow.plan.sizing.plan import Deployment, plan_model
from kvstow.plan.spec import DType, Extent, Field
from kvstow.route.blocks import Blocks
from kvstow.route.price import price
from kvstow.route.route import plan_route
from kvstow.route.sources import sources
from planning import attention, recurrent

TIGHT = Alignment(page=1, row=1, base=64)


def laid_out(*layers, order="BLHNC", pack=packed, num_slabs=12, alignment=TIGHT, **site) -> Layout:
    where = Site(model="m", order=order, alignment=alignment, **site)
    return pack(grouped(layers), num_slabs=num_slabs, site=where)


def first(*ids) -> dict[int, Blocks]:
    return {0: Blocks.first(ids)}


def triples(moves) -> list[tuple[int, int, int]]:
    columns = (moves.source.tolist(), moves.destination.tolist(), moves.nbytes.tolist())
    return list(zip(*columns, strict=True))


TWO = (attention("layers.0"), attention("layers.1"))  # 2 heads × 2 tokens × 8 bytes a page
ROW = 64


class TestJoining:
    @pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "BHLNC"])
    def test_equal_rows_of_neighbouring_blocks_are_one_move(self, order):
        layout = laid_out(*TWO, order=order)
        moves = plan_route(layout, layout).copies(first(2, 3, 4), first(7, 8, 9), 6)
        assert triples(moves) == [(2 * ROW, 7 * ROW, 3 * ROW)]

    def test_padding_between_rows_of_one_request_is_run_over(self):
        layout = laid_out(*TWO, alignment=Alignment(page=1, row=100, base=100))
        moves = plan_route(layout, layout).copies(first(2, 3), first(7, 8), 4)
        assert triples(moves) == [(200, 700, 164)]

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

    @pytest.mark.parametrize(("retention", "needed"), [(Window(3), 4), (Chunk(5), 5), (Full(), 0)])
    def test_a_block_that_the_next_token_needs_must_be_listed_by_the_source(
        self, retention, needed
    ):
        """Six tokens, one to a block: the seventh looks back as far as its retention says."""
        layout = laid_out(attention("layers.0", tokens=1, retention=retention))
        way = plan_route(layout, layout)
        everything = np.arange(6)
        there = {0: Blocks(everything + 2, everything)}
        kept = everything[everything >= needed]
        way.copies({0: Blocks(kept + 2, kept)}, there, 6)
        kept = everything[everything != needed]
        with pytest.raises(RouteError, match=f"logical blocks {needed} "):
            way.copies({0: Blocks(kept + 2, kept)}, there, 6)

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
    def differences(self, here, there) -> tuple[str, ...]:
        with pytest.raises(RouteError) as caught:
            plan_route(here, there)
        return caught.value.differences

    def test_every_difference_is_listed_with_both_values(self):
        here = laid_out(attention("layers.0"), attention("layers.1"))
        there = laid_out(
            attention("layers.0", dtype=DType.FLOAT8_E4M3),
            attention("layers.1", heads=4, dim=6, retention=Window(2)),
        )
        found = "\n".join(self.differences(here, there))
        for text in (
            "'k': dtype is bfloat16 in the source, float8_e4m3fn in the destination",
            "'v': dtype is bfloat16",
            "heads: size is 2 in the source, 4 in the destination",
            "axis 'content': size is 2 in the source, 6 in the destination",
            "retention is Full() in the source, Window(tokens=2)",
        ):
            assert text in found

    def test_fields_that_only_one_side_has_are_refused(self):
        spec = attention("layers.0")
        scale = Field("k_scale", DType.FLOAT32, (Extent.whole("content", 1),))
        scaled = replace(spec, fields=(*spec.fields, scale))
        assert self.differences(laid_out(spec), laid_out(scaled)) == (
            "layer 'layers.0': field 'k_scale' is none in the source, float32 [1] in the "
            "destination",
        )
        assert "none in the destination" in self.differences(laid_out(scaled), laid_out(spec))[0]

    def test_another_model_is_refused(self):
        layout = laid_out(*TWO)
        found = self.differences(layout, replace(layout, model="n"))
        assert found == ("model is 'm' in the source, 'n' in the destination",)

    def test_layers_that_are_missing_without_a_pipeline_are_refused(self):
        found = self.differences(laid_out(TWO[0]), laid_out(TWO[1]))
        assert found == (
            "layer 'layers.1': missing in the source, held by the destination",
            "layer 'layers.0': held by the source, missing in the destination",
        )

    def test_different_tokens_per_state_are_refused(self):
        spec = attention("layers.0", tokens=4)
        found = self.differences(laid_out(spec), laid_out(replace(spec, states=2)))
        assert "tokens per state is 1 in the source, 2 in the destination" in found[0]

    def test_four_bit_elements_split_inside_a_byte_are_refused(self):
        def part(*pieces):
            field = Field("k", DType.INT4, (Extent("content", 8, pieces),))
            return replace(attention("layers.0"), fields=(field,))

        found = self.differences(laid_out(part((0, 4))), laid_out(part((1, 5))))
        assert "split inside a byte" in found[0]

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


class TestSources:
    def ranks(self, model, tp, **how):
        return Deployment(model=model, tp=tp, num_slabs=16, **how).on_rank(0).layouts

    def test_replicas_are_shared_out_evenly_among_destination_ranks(self):
        peers = self.ranks("deepseek-v2-lite", 4)
        chosen = [sources(peers, rank)[0].index for rank in self.ranks("deepseek-v2-lite", 8)]
        assert sorted(chosen) == [0, 0, 1, 1, 2, 2, 3, 3]

    def test_replicas_take_turns_with_requests(self):
        peers = self.ranks("deepseek-v2-lite", 4)
        (alone,) = self.ranks("deepseek-v2-lite", 1)
        chosen = [sources(peers, alone, turn=turn)[0].index for turn in range(4)]
        assert sorted(chosen) == [0, 1, 2, 3]

    def test_heads_on_more_ranks_than_there_are_heads_come_from_one_rank_each(self):
        peers = self.ranks("llama-3.2-1b", 16)
        for rank in self.ranks("llama-3.2-1b", 4):
            found = sources(peers, rank)
            assert len(found) == 2
            assert len({source.index // 2 for source in found}) == 2

    def test_a_rank_with_equal_peers_reads_from_its_counterpart_alone(self):
        peers = self.ranks("bamba-9b", 2)
        for i, rank in enumerate(peers):
            assert [source.index for source in sources(peers, rank)] == [i]

    def test_what_no_source_holds_is_refused_by_name(self):
        peers = self.ranks("llama-3.2-1b", 4)
        (alone,) = self.ranks("llama-3.2-1b", 1)
        with pytest.raises(RouteError, match=r"no source holds heads \[6, 8\)"):
            sources(peers[:3], alone)

    def test_differences_name_the_source(self):
        here = self.ranks("llama-3.2-1b", 2, kv_dtype="fp8")
        (alone,) = self.ranks("llama-3.2-1b", 1)
        with pytest.raises(RouteError) as caught:
            sources(here, alone)
        assert {text.split(":")[0] for text in caught.value.differences} == {"source 0, 1"}

    def test_degrees_that_do_not_divide_each_other_are_joined(self):
        """12 heads on 6 and on 4 ranks: thirds of pairs."""

        def rank(r, tp):
            heads = Extent("head", 12, ((r * 12 // tp, (r + 1) * 12 // tp),))
            return laid_out(replace(attention("layers.0"), heads=heads), tp=(r, tp))

        found = [
            [s.index for s in sources([rank(r, 6) for r in range(6)], rank(q, 4))] for q in range(4)
        ]
        assert found == [[0, 1], [1, 2], [3, 4], [4, 5]]


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
