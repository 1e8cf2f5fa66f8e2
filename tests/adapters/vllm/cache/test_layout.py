"""What vLLM declares of its cache as a layout, and its memory adopted: recorded values, no vLLM."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstow.adapters.vllm.cache.layout import (
    CacheDeclaration,
    DeclaredRegion,
    _check_states,
    _spec,
    adopted,
    axes_of,
    declaration,
    declared_layout,
    declared_order,
    required_layout,
)
from kvstow.adapters.vllm.cache.pages import (
    AFTER_LAST_TOKEN,
    DeclaredPage,
    declared_page,
    retention_of,
)
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.errors import LayoutError, MemoryLayoutError, RouteError
from kvstow.memory.arena import Arena
from kvstow.plan.group import Group
from kvstow.plan.retention import Window
from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.compare import layer_differences
from kvstow.route.route import plan_route
from recorded_vllm import FULL, IDENTITY, hybrid, pages, smollm2

NO_OPTIONS = ConnectorOptions()


def test_in_rows_a_block_of_smollm2_is_one_run_of_5898240_bytes():
    layout = declared_layout(smollm2("BLHNC"), base_align=64)
    assert [run.nbytes for run in layout.runs(0, 5)] == [5_898_240]
    assert layout.num_blocks(0) == 182


def test_layer_by_layer_a_block_of_smollm2_is_30_runs():
    layout = declared_layout(smollm2("LBHNC"), base_align=64)
    assert [run.nbytes for run in layout.runs(0, 5)] == [196_608] * 30


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_groups_that_overlay_each_other_share_slabs(order: str):
    layout = declared_layout(hybrid(order), base_align=64)
    assert layout.sharing == ((0, 1),)
    assert [rows.group.name for rows in layout.groups] == ["window8.0", "full.1"]


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "LBNHC", "BLNHC", "LHBNC", "BHLNC"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("num_blocks", [2, 3])
def test_memory_that_is_as_declared_is_adopted(order: str, heads: int, num_blocks: int):
    declared, views = engine_memory(order, heads, num_blocks)
    layout = declared_layout(declared, base_align=64)
    arena = Arena.adopt(layout, dict(views), axes=axes_of(layout.order))
    views["b"].fill_(3.0)
    assert (arena.tensor("b") == 3.0).all()
    assert (arena.tensor("a") == 0.0).all()


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "LBNHC", "BLNHC", "LHBNC", "BHLNC"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("num_blocks", [2, 3])
def test_tokens_in_order_are_found_where_the_engine_sees_them(
    order: str, heads: int, num_blocks: int
):
    declared, _ = engine_memory(order, heads, num_blocks)
    ordered = tuple(replace(page, in_token_order=True) for page in declared.groups[0])
    declared = replace(declared, groups=(ordered,))
    views = engine_views(order, heads, num_blocks)
    arena = adopted(declared, views)
    for name, view in views.items():
        view.copy_(torch.arange(view.numel()).reshape(view.shape) + (1000 if name == "b" else 0))
    for name, view in views.items():
        assert torch.equal(arena.tensor(name), view)
        assert arena.layout.layers[name][1].states == 4


def engine_views(order: str, heads: int, num_blocks: int) -> dict[str, torch.Tensor]:
    """Two layers in one allocation as `[block, head, token, content]`."""
    sizes = {"L": 2, "B": num_blocks, "H": heads, "N": 4, "C": 6}
    dense = torch.zeros([sizes[letter] for letter in order])
    logical = dense.permute([order.index(letter) for letter in "LBHNC"])
    return {"a": logical[0], "b": logical[1]}


def engine_memory(
    order: str, heads: int, num_blocks: int
) -> tuple[CacheDeclaration, dict[str, torch.Tensor]]:
    """Two layers in one allocation, strides by torch's own permutation of a dense tensor."""
    sizes = {"L": 2, "B": num_blocks, "H": heads, "N": 4, "C": 6}
    dense = torch.zeros([sizes[letter] for letter in order])
    logical = dense.permute([order.index(letter) for letter in "LBHNC"])
    declared = CacheDeclaration(
        identity=IDENTITY,
        order=order,
        num_blocks=num_blocks,
        groups=(pages(["a", "b"], FULL, heads, tokens=4, content=6),),
        regions=(
            DeclaredRegion(
                layers=("a", "b"),
                nbytes=dense.numel() * 4,
                layer_stride=logical.stride(0) * 4,
                block_stride=logical.stride(1) * 4,
                offset=0,
            ),
        ),
    )
    views: dict[str, torch.Tensor] = {}
    for layer, name in enumerate(["a", "b"]):
        cache = logical[layer]
        if order.index("H") < order.index("N"):
            views[name] = cache.view(num_blocks, heads, 24)
        else:
            views[name] = cache.transpose(1, 2).view(num_blocks, -1)
    return declared, views


def test_memory_in_another_order_than_declared_is_refused():
    declared, _ = engine_memory("BLHNC", 2, 3)
    _, views = engine_memory("LBHNC", 2, 3)
    layout = declared_layout(declared, base_align=64)
    with pytest.raises(MemoryLayoutError, match="stride"):
        Arena.adopt(layout, dict(views), axes=axes_of(layout.order))


def test_an_order_that_nobody_knows_is_refused():
    with pytest.raises(MemoryLayoutError, match="'NHD'"):
        declared_order("NHD")


def test_a_layer_without_a_place_is_refused():
    declared = smollm2("BLHNC")
    region = replace(declared.regions[0], layers=declared.regions[0].layers[1:])
    with pytest.raises(MemoryLayoutError, match=r"model\.layers\.0\."):
        declared_layout(replace(declared, regions=(region,)), base_align=64)


def test_pages_that_overlap_inside_a_group_are_refused():
    declared = smollm2("BLHNC")
    region = replace(declared.regions[0], layer_stride=declared.regions[0].layer_stride // 2)
    with pytest.raises(LayoutError):
        declared_layout(replace(declared, regions=(region,)), base_align=64)


def test_rows_and_layers_of_one_model_are_joined():
    rows, layers = (declared_layout(smollm2(order), base_align=64) for order in ("BLHNC", "LBHNC"))
    blocks = {0: Blocks.first([3, 4])}
    moves = plan_route(rows, layers).copies(blocks, blocks, 200)
    assert moves.total == 2 * 5_898_240


def test_different_tokens_per_block_are_refused_because_pages_are_opaque():
    """vLLM's CPU kernels keep keys transposed over the whole block."""
    other = smollm2("BLHNC")
    halved = tuple(replace(page, block_tokens=64, states=64) for page in other.groups[0])
    region = replace(
        other.regions[0],
        nbytes=other.regions[0].nbytes // 2,
        layer_stride=98_304,
        block_stride=98_304 * 30,
    )
    small = declared_layout(replace(other, groups=(halved,), regions=(region,)), base_align=64)
    with pytest.raises(RouteError, match="tokens per state"):
        plan_route(declared_layout(smollm2("BLHNC"), base_align=64), small)


def test_a_window_is_longer_where_speculation_computes_tokens_before_it_again():
    """vLLM keeps `extra_retained_tokens` more: blocks that it keeps are blocks that must come."""
    kind = type("SlidingWindowSpec", (SimpleNamespace,), {})  # kinds are known by name
    assert retention_of(kind(sliding_window=8, extra_retained_tokens=3)) == Window(11)


# ── which computation ─────────────────────────────────────────────────────────────────────


def test_the_layout_of_an_engine_carries_its_identity():
    assert declared_layout(smollm2("BLHNC"), base_align=64).identity == IDENTITY


@pytest.mark.parametrize(
    ("device", "mla", "asked", "wanted"),
    [
        ("cuda", True, "BLHNC", "BLHNC"),
        ("cpu", False, "BLHNC", "BLHNC"),
        ("cpu", True, "BLHNC", None),
        ("cpu", True, "", None),
        ("cuda", False, "", None),
    ],
)
def test_rows_are_not_asked_for_where_kernels_cannot_view_them(device, mla, asked, wanted):
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(use_mla=mla),
    )
    assert required_layout(config, ConnectorOptions(layout=asked)) == wanted


def mixer(spec: Any, tp: tuple[int, int]) -> DeclaredPage:
    return declared_page("mixer", spec, order="BLHNC", tp=tp, total_heads=8)


def mamba(**changes: Any) -> Any:
    facts = {
        "mamba_cache_mode": "align",
        "num_speculative_blocks": 0,
        "num_prefill_checkpoint_blocks": 1,
        "tp_replicated": False,
        "block_size": 128,
        "state_content_size_bytes": 35_840,
        "shapes": ((3, 512), (8, 64, 64)),
        "dtypes": (torch.bfloat16, torch.bfloat16),
        "tokens_per_state": -1,
    }
    return type("MambaSpec", (), {**facts, **changes})()


def test_a_recurrent_state_is_one_opaque_page_that_only_the_next_token_needs():
    page = mixer(mamba(), (1, 2))
    assert (page.nbytes, page.states, page.block_tokens) == (35_840, 1, 128)
    assert page.heads.pieces == ((1, 2),)
    assert page.retention == AFTER_LAST_TOKEN
    assert mixer(mamba(tp_replicated=True), (1, 2)).heads.total == 1
    held = Blocks.first([5, 6, 7])
    group = Group(name="state", layers=(_spec(page, "LBHNC"),))
    for num_tokens, needed in ((1, 0), (128, 0), (129, 1), (256, 1), (257, 2)):
        tokens = Tokens(0, num_tokens).needed(group)
        assert (tokens.first, tokens.end) == (num_tokens - 1, num_tokens)
        assert held.index[tokens.first // 128] == needed


@pytest.mark.parametrize(
    "change",
    [{"dtypes": (torch.bfloat16, torch.float16)}, {"shapes": ((512, 3), (8, 64, 64))}],
)
def test_states_of_one_size_that_kernels_read_otherwise_are_not_joined(change: dict[str, Any]):
    """Such as VLLM_SSM_CONV_STATE_LAYOUT=DS on one side, or another mamba_ssm_cache_dtype."""
    ours, theirs = (_spec(mixer(mamba(**each), (0, 1)), "BLHNC") for each in ({}, change))
    assert ours.page_bytes == theirs.page_bytes
    assert list(layer_differences(ours, theirs))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mamba_cache_mode": "none"}, "mode 'none', which has no state for each block"),
        ({"num_speculative_blocks": 3}, "3 states of speculative decoding"),
    ],
)
def test_states_that_cannot_be_handed_over_are_refused_with_the_reason(changes, reason):
    with pytest.raises(MemoryLayoutError, match=reason):
        mixer(mamba(**changes), (0, 1))


@pytest.mark.parametrize(
    ("attention", "unit", "saved", "fine"),
    [
        (128, 128, 1, True),
        (128, 16, 1, False),
        (16, 16, 1, False),
        (256, 128, 1, False),
        (16, 16, 0, True),
    ],
)
def test_states_in_the_middle_of_prompts_are_stored_only_where_blocks_end(
    attention: int, unit: int, saved: int, fine: bool
):
    """vLLM puts one more state, of the last prefix that a hit may end at, into the block before
    the last one: with 128 and 16, that after 288 tokens into the place of that after 256."""
    state, full = mamba(num_prefill_checkpoint_blocks=saved), SimpleNamespace(block_size=attention)
    config = SimpleNamespace(
        hash_block_size=unit,
        kv_cache_groups=[
            SimpleNamespace(layer_names=[name], kv_cache_spec=spec)
            for name, spec in (("mixer", state), ("attention", full))
        ],
    )
    if fine:
        _check_states(config)
    else:
        with pytest.raises(MemoryLayoutError, match="may then be those of another prefix"):
            _check_states(config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parallel": {"decode_context_parallel_size": 2}}, "context parallelism"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "context parallelism"),
    ],
)
def test_engines_whose_blocks_are_not_what_they_seem_are_refused(change: Any, reason: str):
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel | change.get("parallel", {})),
        model_config=SimpleNamespace(**change.get("model", {})),
    )
    with pytest.raises(MemoryLayoutError, match=reason):
        declaration(config, SimpleNamespace(), NO_OPTIONS)
