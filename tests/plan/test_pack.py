from dataclasses import dataclass

import pytest

from kvstow.errors import PlanError
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS
from kvstow.plan.models import catalogue, model_layers
from kvstow.plan.pack import Site, packed, separate, union
from kvstow.plan.retention import Window
from planning import attention

PACKINGS = (packed, union, separate)


@pytest.mark.parametrize("name", catalogue())
@pytest.mark.parametrize("memory", [1 << 30, 40 << 30])
def test_padding_of_catalogue_models_keeps_within_four_percent(name, memory):
    layout = packed(grouped(model_layers(name).layers), budget=memory)
    padding = [
        1
        - rows.rows_per_slab
        * sum(layer.page_bytes for layer in rows.group.layers)
        / layout.slab_bytes
        for rows in layout.groups
    ]
    assert max(padding) <= 0.04
    assert sum(padding) / len(padding) <= 0.025
    assert (1 << 30) // layout.slab_bytes >= 12
    if len(layout.groups) == 1:
        assert max(padding) == 0


def test_union_has_the_incumbents_five_groups_and_their_fill():
    layout = union(grouped(model_layers("deepseek-v4-flash").layers), budget=60 << 30)
    assert layout.slab_bytes == 1_002_240
    fills = sorted(round(100 * rows.group.page_bytes / 1_002_240) for rows in layout.groups)
    assert fills == [66, 78, 82, 87, 100]


def test_union_inflates_attention_blocks_to_the_state_page_and_packed_never_does():
    groups = grouped(model_layers("qwen3-next-80b").layers)
    inflated = union(groups, budget=40 << 30)
    assert inflated.slab_bytes == 13_369_344
    assert inflated.groups[0].group.block_tokens == 544
    tight = packed(groups, budget=40 << 30)
    assert tight.groups[0].group.block_tokens == 16


def test_a_later_group_with_a_larger_page_counts():
    """Facts 1: the slab is not sized by the first group."""
    layers = [attention("a", heads=1, dim=2), attention("b", heads=8, dim=64, retention=Window(4))]
    for pack in PACKINGS:
        layout = pack(grouped(layers), num_slabs=3)
        assert layout.slab_bytes >= max(rows.group.page_bytes for rows in layout.groups)
        assert layout.groups[1].group.page_bytes > layout.groups[0].group.page_bytes


@dataclass
class Lookalike:
    """Behaves like a number where nobody looks closely."""

    value: int

    def __index__(self) -> int:
        return self.value

    def __floordiv__(self, other: int) -> int:
        return self.value // other


def test_a_budget_may_be_written_as_people_write_it():
    groups = grouped([attention("a")])
    for pack in PACKINGS:
        assert pack(groups, budget="1MiB") == pack(groups, budget=1 << 20)


@pytest.mark.parametrize("tokens", [0, -1, True, 8.0, 10**18])
def test_a_context_of_no_tokens_is_refused(tokens):
    groups = grouped([attention("a"), attention("b", retention=Window(4))])
    with pytest.raises(PlanError, match=f"context_tokens is {tokens!r}"):
        separate(groups, num_slabs=4, context_tokens=tokens)


@pytest.mark.parametrize("order", ORDERS)
def test_an_arena_beyond_all_addresses_is_refused(order):
    site = Site(order=order)
    long = grouped([attention("a", tokens=1 << 40, heads=1 << 20), attention("b")])
    for pack in PACKINGS:
        with pytest.raises(PlanError, match=r"number of slabs is 10{27}, .* to \d+"):
            pack(grouped([attention("a")]), num_slabs=10**27, site=site)
        with pytest.raises(PlanError, match=r"take \d+ bytes, not below 2\^63\n\nhint: "):
            pack(grouped([attention("a")]), num_slabs=(1 << 63) - 1, site=site)
        with pytest.raises(PlanError, match=r"2\^63\n\nhint: fewer tokens per block"):
            pack(long, num_slabs=4, site=site)


def test_no_groups_make_no_layout():
    for pack in PACKINGS:
        with pytest.raises(PlanError, match="no groups to place"):
            pack((), num_slabs=4)


def test_layers_that_are_not_grouped_are_refused_with_what_to_do():
    for pack in PACKINGS:
        with pytest.raises(PlanError, match=r"got LayerSpec\n\nhint: grouped\(layers\)"):
            pack([attention("a")], num_slabs=4)


@pytest.mark.parametrize("wrong", [{"order": "blhnc"}, {"order": "HND"}, {"order": "XYZ"}])
def test_a_site_has_its_order_in_canonical_form(wrong):
    with pytest.raises(PlanError, match=r"order .*\n\nhint: "):
        Site(**wrong)


@pytest.mark.parametrize("budget", [1e9, True, "20 bytes", Lookalike(1 << 30), 0, -5, 10**27])
def test_a_budget_that_is_no_whole_number_is_refused(budget):
    """Facts 4: a mock object must not become a block count."""
    groups = grouped([attention("a")])
    for pack in PACKINGS:
        with pytest.raises(PlanError, match=r"is not a size|bytes, not in"):
            pack(groups, budget=budget)
        with pytest.raises(PlanError, match="number of slabs is"):
            pack(groups, num_slabs=budget)


def test_a_budget_and_a_number_of_slabs_exclude_each_other():
    groups = grouped([attention("a")])
    with pytest.raises(PlanError, match="either"):
        packed(groups)
    with pytest.raises(PlanError, match="either"):
        packed(groups, budget=1, num_slabs=2)


def test_a_budget_below_two_slabs_is_refused_with_the_least_that_works():
    groups = grouped([attention("a", heads=2, dim=64)])
    with pytest.raises(PlanError) as refused:
        packed(groups, budget=1000)
    least = int(str(refused.value).rsplit("at least ", 1)[1].split()[0].replace(",", ""))
    assert packed(groups, budget=least).num_slabs == 2
    with pytest.raises(PlanError):
        packed(groups, budget=least - 1)


def test_a_long_recurrent_row_becomes_equal_groups():
    layout = packed(grouped(model_layers("qwen3-next-80b").layers), budget=8 << 30)
    states = [rows for rows in layout.groups if rows.group.name.startswith("state")]
    assert len(states) > 1
    assert len({len(rows.group.layers) for rows in states}) == 1
    assert max(rows.group.page_bytes for rows in states) <= 32 << 20
