"""What each rank holds of what the whole model keeps, tokens per block, cache dtypes."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import ModelError
from kvstow.plan.models import catalogue, model_layers
from kvstow.plan.models.serving import AxisPart, ServingOptions, stage
from kvstow.plan.retention import State
from kvstow.plan.spec import DType, Extent, LayerSpec
from model_facts import LLAMA


def extents(layer: LayerSpec) -> dict[tuple[str, ...], Extent]:
    """Every axis of a layer that could be split, by field and name."""
    axes = {(f.name, axis.name): axis for f in layer.fields for axis in f.axes}
    return {("heads",): layer.heads} | axes


def elements(extent: Extent) -> list[int]:
    return [i for lo, hi in extent.pieces for i in range(lo, hi)]


def ranks(name: str, tp: int) -> list[tuple[LayerSpec, ...]]:
    return [model_layers(name, tp=tp, tp_rank=rank).layers for rank in range(tp)]


@given(st.sampled_from(catalogue()), st.sampled_from([1, 2, 3, 4, 8, 16, 32]))
def test_all_ranks_together_hold_every_element_and_replicas_are_equal(name: str, tp: int) -> None:
    try:
        held = ranks(name, tp)
    except ModelError:
        return
    for same_layer in {tuple(layers) for layers in zip(*held, strict=True)}:
        for key, whole in extents(same_layer[0]).items():
            shares = [extents(layer)[key] for layer in same_layer]
            assert {share.size for share in shares} == {whole.size}
            assert {i for share in shares for i in elements(share)} == set(range(whole.total))
            single = {share for share in shares if len(share.pieces) == 1}
            for one, other in combinations(single, 2):
                assert set(elements(one)).isdisjoint(elements(other))


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 5))
def test_replicas_of_a_unit_are_equal_and_every_rank_holds_as_much(
    units: int, tp: int, size: int
) -> None:
    part = AxisPart("units", units, size, replicable=True)
    if units % tp and tp % units:
        with pytest.raises(ModelError, match=f"{units} units cannot be split over {tp}"):
            ServingOptions(tp=tp, rank=0).split("axis", part)
        return
    held = [ServingOptions(tp=tp, rank=rank).split("axis", part) for rank in range(tp)]
    copies = max(1, tp // units)
    assert {extent.size for extent in held} == {size * max(1, units // tp)}
    for rank, extent in enumerate(held):
        assert extent == held[rank - rank % copies]
    assert sorted(i for e in held[::copies] for i in elements(e)) == list(range(units * size))


@given(st.integers(1, 64), st.integers(1, 64))
def test_what_a_rank_computes_is_never_replicated(units: int, tp: int) -> None:
    part = AxisPart("query heads", units)
    if units % tp:
        with pytest.raises(ModelError, match=f"{units} query heads(?s:.*)divides {units}"):
            ServingOptions(tp=tp, rank=tp - 1).split("head", part)
    else:
        assert ServingOptions(tp=tp, rank=tp - 1).split("head", part).size == units // tp


def test_a_gated_delta_net_is_split_into_pieces_of_q_k_and_v() -> None:
    layer = model_layers("qwen3-next-80b", tp=2, tp_rank=1).layers[0]
    conv, ssm = layer.field("conv"), layer.field("ssm")
    assert conv.axes[0] == Extent("channel", 8192, ((1024, 2048), (3072, 4096), (6144, 8192)))
    assert ssm.axes[0] == Extent("ssm_head", 32, ((16, 32),))
    assert layer.page_bytes == 1_097_728 // 2


def test_mamba2_groups_are_split_while_there_are_enough() -> None:
    layer = model_layers("nemotron-h-8b", tp=4, tp_rank=1).layers[0]
    pieces = ((2048, 4096), (8192 + 256, 8192 + 512), (9216 + 256, 9216 + 512))
    assert layer.field("conv").axes[0] == Extent("channel", 10_240, pieces)


@pytest.mark.parametrize("rank", [-1, 2, True, 1.0, "0"])
def test_a_rank_outside_the_ranks_is_refused(rank: object) -> None:
    with pytest.raises(ModelError, match="is not one of the 2"):
        model_layers("llama-3.1-8b", tp=2, tp_rank=rank)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="is not one of the 2"):
        model_layers("llama-3.1-8b", pp=2, pp_rank=rank)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [
        (32, [8, 8, 8, 8]),
        (61, [31, 30]),
        (61, [15, 15, 16, 15]),
        (22, [5, 6, 6, 5]),
        (7, [2, 3, 2]),
        (5, [2, 2, 1]),
        (43, [4, 4, 4, 4, 4, 4, 5, 5, 5, 4]),
        (1, [1]),
    ],
)
def test_stages_are_balanced_as_the_engines_do(num_layers: int, sizes: list[int]) -> None:
    pp = len(sizes)
    assert [len(stage(num_layers, pp=pp, pp_rank=rank)) for rank in range(pp)] == sizes


@given(st.integers(1, 200), st.data())
def test_stages_are_contiguous_and_leave_nothing_out(num_layers: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, num_layers))
    stages = [stage(num_layers, pp=pp, pp_rank=rank) for rank in range(pp)]
    assert [i for part in stages for i in part] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_all_caches_of_a_decoder_layer_stay_together() -> None:
    for rank in range(3):
        names = [x.name for x in model_layers("deepseek-v4-pro", pp=3, pp_rank=rank).layers]
        own = {int(name.split(".")[2]) for name in names}
        whole = [x.name for x in model_layers("deepseek-v4-pro").layers]
        assert names == [name for name in whole if int(name.split(".")[2]) in own]


def test_the_stages_of_a_model_are_the_model() -> None:
    whole = model_layers("jamba-mini", tp=2, tp_rank=1).layers
    parts = [model_layers("jamba-mini", tp=2, tp_rank=1, pp=5, pp_rank=r).layers for r in range(5)]
    assert tuple(layer for part in parts for layer in part) == whole


def test_a_stage_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="stage 1 of 52 holds no layer that keeps anything"):
        model_layers("nemotron-h-8b", pp=52, pp_rank=1)


# ── what the operator chooses ─────────────────────────────────────────────────────────────


def test_a_missing_dtype_is_noted_and_planned_as_bfloat16() -> None:
    model = model_layers({k: v for k, v in LLAMA.items() if k != "torch_dtype"})
    assert model.layers[0].field("k").dtype is DType.BFLOAT16
    assert model.notes == ("no dtype in the configuration: planned as bfloat16",)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "16"])
@pytest.mark.parametrize("key", ["block_tokens", "tp", "pp"])
def test_a_choice_that_is_not_a_whole_positive_number_is_refused(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"{key} is {value!r}"):
        model_layers(LLAMA, **{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [8, True, "fp12", ""])
def test_a_cache_dtype_that_is_no_known_name_is_refused(value: object) -> None:
    with pytest.raises(ModelError, match="dtype"):
        model_layers(LLAMA, kv_dtype=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "bits"), [("auto", 16), ("AUTO", 16), ("fp8", 8), ("fp32", 32)])
def test_the_cache_dtype_replaces_the_models_own_unless_it_is_auto(name: str, bits: int) -> None:
    assert model_layers(LLAMA, kv_dtype=name).layers[0].field("k").dtype.bits == bits


def test_recurrent_pages_change_neither_with_tokens_per_block_nor_with_the_cache_dtype() -> None:
    def states(**choices: object) -> list[int]:
        model = model_layers("qwen3-next-80b", **choices)  # type: ignore[arg-type]
        return [x.page_bytes for x in model.layers if isinstance(x.retention, State)]

    assert states() == states(block_tokens=544) == states(kv_dtype="fp8") == [1_097_728] * 36
