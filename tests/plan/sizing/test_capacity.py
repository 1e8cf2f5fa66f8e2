from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from kvstow.plan.group import grouped
from kvstow.plan.layout import NULL_SLABS
from kvstow.plan.models import model_layers
from kvstow.plan.pack import packed, union
from kvstow.plan.retention import Window
from kvstow.plan.sizing.capacity import (
    bytes_per_token,
    fits,
    fixed_bytes,
    max_requests,
    max_tokens,
    request_bytes,
)
from planning import attention, layer_lists, recurrent


def test_the_null_slab_is_counted_out_of_the_capacity():
    """Facts 5: 10 blocks, one of them null, hold nine one-block requests."""
    layout = packed(grouped([attention("a", tokens=4)]), num_slabs=10)
    assert NULL_SLABS == 1
    assert max_requests(layout, 4) == 9
    assert max_tokens(layout) == 36


def test_a_smaller_budget_is_planned_anew_not_scaled():
    """Facts 5: strides follow the plan; only the number of slabs follows the budget."""
    groups = grouped([attention("a", dim=64), attention("b", dim=64, retention=Window(8))])
    layout = packed(groups, budget=1 << 20)
    half = packed(groups, budget=1 << 19)
    assert half.nbytes == half.num_slabs * half.slab_bytes <= 1 << 19
    assert layout.nbytes == layout.num_slabs * layout.slab_bytes <= 1 << 20


@given(layer_lists(), st.integers(1, 60), st.integers(2, 6), st.sampled_from([packed, union]))
def test_so_many_requests_fit_and_not_one_more(layers, num_tokens, num_slabs, pack):
    layout = pack(grouped(layers), num_slabs=num_slabs)
    most = max_requests(layout, num_tokens)
    assert most == 0 or fits(layout, most, num_tokens)
    assert not fits(layout, most + 1, num_tokens)


@given(layer_lists(), st.integers(1, 200))
def test_a_request_never_costs_more_than_its_fixed_part_and_its_growth(layers, num_tokens):
    layout = packed(grouped(layers), num_slabs=4)
    growing = sum(
        layout.row_stride(g)
        for g, rows in enumerate(layout.groups)
        if rows.group.name.startswith("full")
    )
    limit = fixed_bytes(layout) + bytes_per_token(layout) * num_tokens + growing
    assert request_bytes(layout, num_tokens) <= limit


def test_bytes_per_token_is_exact_even_where_it_is_no_whole_number():
    layout = packed(grouped([attention("a", tokens=3, heads=1, dim=2)]), num_slabs=2)
    assert bytes_per_token(layout) == Fraction(layout.row_stride(0), 3)


def test_a_request_of_a_pure_state_model_may_be_of_any_length():
    layout = packed(grouped([recurrent("r")]), num_slabs=3)
    assert max_tokens(layout) is None
    assert bytes_per_token(layout) == 0
    assert max_requests(layout, 10**9) == 2


def test_llama_8b_in_20_gib_is_arithmetic():
    groups = grouped(model_layers("llama-3.1-8b").layers)
    layout = packed(groups, budget=20 << 30)
    assert layout.num_slabs == (20 << 30) // (2 << 20)
    assert bytes_per_token(layout) == 131_072
    assert max_tokens(layout) == (10_240 - 1) * 16
