"""Models on their ranks, and the plan that the front door gives."""

import pytest
import torch

from kvstow.errors import ModelError, PlanError
from kvstow.plan import pack
from kvstow.plan.group import grouped
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed
from kvstow.plan.sizing.capacity import max_requests, request_bytes
from kvstow.plan.sizing.plan import Deployment, plan_model, repacked

HYBRID = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "sliding_window": 32,
    "dtype": "bfloat16",
}


def test_a_plan_is_the_layout_written_out():
    plan = plan_model("llama-3.1-8b", memory="20GiB", tp=2, rank=1, order="hnd", kv_dtype="fp8")
    layers = model_layers("llama-3.1-8b", tp=2, tp_rank=1, kv_dtype="fp8_e4m3").layers
    site = Site(model="llama-3.1-8b", order="BLHNC", tp=(1, 2))
    assert plan.layout == packed(grouped(layers), budget=20 << 30, site=site)
    assert plan.layout == plan.layouts[1]
    assert plan.model == "llama-3.1-8b"


def test_the_rank_with_the_fewest_requests_limits_the_plan():
    """Five layers on two stages are three and two: the first stage fills first."""
    plan = plan_model(HYBRID, memory="8MiB", tp=2, pp=2)
    assert [len(layout.layers) for layout in plan.layouts] == [3, 3, 2, 2]
    for tokens in (1, 31, 1000):
        counts = [max_requests(layout, tokens) for layout in plan.layouts]
        assert plan.max_requests(tokens=tokens) == min(counts) == counts[0]
        assert plan.bytes_per_request(tokens=tokens) == request_bytes(plan.layouts[0], tokens)
    assert plan.limiting_rank == 0


@pytest.mark.parametrize("model", [HYBRID, "qwen3-next-80b", "deepseek-v4-flash"])
def test_ranks_of_one_stage_hold_equally_many_bytes(model):
    """What `Plan` rests on when it looks at the first rank of each stage only."""
    plan = plan_model(model, num_slabs=8, tp=4, pp=2)
    for rank, layout in enumerate(plan.layouts):
        first = plan.stages[rank // 4]
        assert layout.nbytes == first.nbytes
        assert request_bytes(layout, 8192) == request_bytes(first, 8192)
        assert max_requests(layout, 100) == max_requests(first, 100)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_each_layout_is_planned_once(monkeypatch, rank):
    planned: list[int] = []

    def packed_as(*arguments, site, **size):
        planned.append(site.pp[0] * site.tp[1] + site.tp[0])
        return pack.packed_as(*arguments, site=site, **size)

    monkeypatch.setattr("kvstow.plan.sizing.plan.packed_as", packed_as)
    plan = plan_model(HYBRID, memory="8MiB", tp=2, pp=2, rank=rank)
    assert plan.layout is plan.layout
    assert plan.max_requests(tokens=100) > 0
    assert len(planned) == 2  # a rank of each stage
    assert plan.layouts[rank] is plan.layout
    assert sorted(planned) == [0, 1, 2, 3]


def test_a_plan_says_in_a_few_lines_what_it_is():
    plan = plan_model("gpt-oss-20b", memory="20GiB")
    lines = repr(plan).splitlines()
    assert len(lines) <= 6
    assert lines[0].startswith("Plan of gpt-oss-20b: rank 0 of tp 1 × pp 1, order BLHNC")
    fit = max_requests(plan.layout, 8192)
    assert f"{fit} requests of 8,192 tokens fit" in lines[-1]


def test_without_a_size_sixteen_gib_are_planned_for():
    assert plan_model(HYBRID).layout == plan_model(HYBRID, memory=16 << 30).layout
    assert plan_model(HYBRID, num_slabs=9).layout.num_slabs == 9


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"memory": "20 gigs"}, PlanError, "'20 gigs' is not a size"),
        ({"memory": "1KiB"}, PlanError, "a budget of 1,024 bytes holds 0 slabs"),
        ({"memory": 1 << 30, "num_slabs": 4}, PlanError, "memory 1073741824 and num_slabs 4"),
        ({"num_slabs": 10**27}, PlanError, "number of slabs is 10{27}"),
        ({"block_tokens": 10**18}, PlanError, "block_tokens is 10{18}"),
        ({"block_tokens": 16.0}, PlanError, r"block_tokens is 16\.0"),
        ({"tp": 0}, PlanError, "tp is 0"),
        ({"pp": True}, PlanError, "pp is True"),
        ({"tp": 3}, ModelError, "8 attention heads cannot be split over 3"),
        ({"pp": 6}, ModelError, "5 layers cannot fill 6 pipeline stages"),
        ({"rank": 1}, PlanError, "rank 1: tp 1 × pp 1 is 1 rank"),
        ({"order": "XYZ"}, PlanError, "order 'XYZ' is none of"),
        ({"packing": "loose"}, PlanError, "packing 'loose' is none of slab, union, separate"),
        ({"kv_dtype": "fp9"}, ModelError, "unknown cache dtype 'fp9'\n\nhint: one of bfloat16"),
        ({"kv_dtype": torch.float16}, ModelError, "torch.float16, not a name\n\nhint: "),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_values(change, kind, words):
    with pytest.raises(kind, match=words):
        plan_model(HYBRID, **change)


@pytest.mark.parametrize("tokens", [0, -1, True, 1.5, 10**18])
def test_requests_have_a_number_of_tokens(tokens):
    plan = plan_model(HYBRID)
    with pytest.raises(PlanError, match="tokens is"):
        plan.max_requests(tokens=tokens)
    with pytest.raises(PlanError, match="tokens is"):
        plan.bytes_per_request(tokens=tokens)


def test_a_deployment_has_no_rank_beyond_its_last():
    with pytest.raises(PlanError, match="rank 2: tp 2 × pp 1 is 2 ranks"):
        Deployment(model="llama-3.2-1b", tp=2).layout(2)


def test_another_order_keeps_groups_slabs_and_ranks():
    layout = Deployment(model=HYBRID, tp=2, num_slabs=7).layout(1)
    other = repacked(layout, "LBHNC", "slab")
    assert (other.order, other.num_slabs, other.tp) == ("LBHNC", 7, (1, 2))
    assert set(other.layers) == set(layout.layers)
    assert repacked(other, "BLHNC", "slab").layers.keys() == layout.layers.keys()


def test_more_ranks_than_anybody_has_are_refused():
    with pytest.raises(PlanError, match="tp × pp is 4294967296"):
        Deployment(model="llama-3.2-1b", tp=1 << 16, pp=1 << 16)
