"""Sizing: weights and cache on GPUs, against arithmetic done by hand."""

import pytest

from kvstow.errors import PlanError
from kvstow.plan.sizing.cluster import GPUS, Gpu, clusters, needed, sized
from kvstow.plan.sizing.plan import Deployment, plan_model

H100 = 81559 << 20
USABLE = int(H100 * 0.9)
LLAMA_8B = 16_060_000_000
LLAMA_ROW = 32 * 2 * 8 * 128 * 2 * 16  # all layers, keys and values of 16 tokens in bfloat16


def test_what_fits_is_the_rest_of_the_memory_in_whole_rows():
    found = sized(Deployment(model="llama-3.1-8b"), usable=USABLE, weights=LLAMA_8B, tokens=8192)
    slabs = (USABLE - LLAMA_8B) // LLAMA_ROW
    assert found.max_requests == (slabs - 1) // 512  # a slab is a row here, and one is nobody's
    assert found.num_gpus == 1
    assert found.limiting.request_bytes == 512 * LLAMA_ROW


def test_tensor_parallel_ranks_split_weights_and_heads_and_replicas_add_up():
    one = sized(
        Deployment(model="llama-3.1-8b", tp=8), usable=USABLE, weights=LLAMA_8B, tokens=8192
    )
    assert one.limiting.weights_bytes == LLAMA_8B // 8
    slabs = (USABLE - LLAMA_8B // 8) // (LLAMA_ROW // 8)
    assert one.max_requests == (slabs - 1) // 512
    three = sized(
        Deployment(model="llama-3.1-8b", tp=8), usable=USABLE, weights=LLAMA_8B, tokens=8192, dp=3
    )
    assert three.max_requests == 3 * one.max_requests
    assert three.num_gpus == 24


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (8, 1), (16, 2), (32, 4)])
def test_heads_are_repeated_on_ranks_beyond_their_number(tp, copies):
    found = sized(
        Deployment(model="llama-3.1-8b", tp=tp), usable=USABLE, weights=LLAMA_8B, tokens=8192
    )
    assert found.head_copies == copies
    assert found.limiting.request_bytes == 512 * LLAMA_ROW // min(tp, 8)


def test_the_stage_with_the_most_layers_limits():
    found = sized(Deployment(model="llama-3.1-8b", pp=5), usable=USABLE, weights=0, tokens=8192)
    assert [stage.layers for stage in found.stages] == [6, 6, 7, 7, 6]
    assert found.limiting.rank == 2
    each = [((USABLE // (LLAMA_ROW * n // 32)) - 1) // 512 for n in (6, 6, 7, 7, 6)]
    assert [stage.requests for stage in found.stages] == each
    assert found.max_requests == min(each)


def test_weights_are_split_by_the_layers_of_a_stage():
    found = sized(Deployment(model="llama-3.1-8b", pp=5), usable=USABLE, weights=3200, tokens=16)
    assert [stage.weights_bytes for stage in found.stages] == [600, 600, 700, 700, 600]


@pytest.mark.parametrize("weights", [USABLE, H100, 10 * H100])
def test_nothing_fits_beside_weights_that_fill_the_gpu(weights):
    found = sized(Deployment(model="llama-3.1-8b"), usable=USABLE, weights=weights, tokens=1)
    assert found.max_requests == 0


@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v4-flash", "jamba-mini"]
)
@pytest.mark.parametrize("requests", [1, 2, 37])
def test_a_load_fits_into_what_it_needs_and_not_into_a_slab_less(model, requests):
    (stage,) = needed(Deployment(model=model), weights=0, tokens=5000, requests=requests)
    one = plan_model(model, num_slabs=2).layout
    num_slabs = stage.cache_bytes // one.slab_bytes
    assert plan_model(model, num_slabs=num_slabs).max_requests(tokens=5000) >= requests
    if num_slabs > 2:
        assert plan_model(model, num_slabs=num_slabs - 1).max_requests(tokens=5000) < requests


def test_the_smallest_cluster_comes_first_and_carries_the_load():
    weights = 141_000_000_000
    found = clusters(
        Deployment(model="llama-3.1-70b"),
        usable=lambda tp: USABLE,
        weights=weights,
        tokens=8192,
        requests=200,
        kv_dtypes=(None, "fp8"),
    )
    assert [each.num_gpus for each in found] == sorted(each.num_gpus for each in found)
    assert all(each.max_requests >= 200 for each in found)
    best = found[0]
    for tp in (1, 2, 4, 8):  # no split with fewer GPUs does it, tried one by one
        for kv_dtype in (None, "fp8"):
            deployment = Deployment(model="llama-3.1-70b", tp=tp, kv_dtype=kv_dtype)
            one = sized(deployment, usable=USABLE, weights=weights, tokens=8192)
            dp = (best.num_gpus - 1) // tp
            assert one.max_requests * dp < 200


def test_no_cluster_is_found_where_no_split_has_room():
    found = clusters(
        Deployment(model="llama-3.1-8b"),
        usable=lambda tp: 1 << 20,
        weights=LLAMA_8B,
        tokens=8192,
        requests=1,
        kv_dtypes=(None,),
    )
    assert found == ()


def test_a_gpu_is_a_name_or_a_size():
    assert Gpu.parse("h100") == Gpu.parse(" H100") == Gpu("h100", GPUS["h100"])
    assert GPUS["h100"] == H100
    assert Gpu.parse("80GiB").nbytes == 80 << 30
    assert Gpu.parse("24G").nbytes == 24 << 30
    for text, words in (("h10", "h100"), ("qqqq", "l40s"), ("80 gigs", "not a size")):
        with pytest.raises(PlanError, match=words):
            Gpu.parse(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a100", "a100-80"),
        ("A100 80GB", "a100-80"),
        ("a100-40gb", "a100-40"),
        ("NVIDIA H100", "h100"),
        ("rtx 3090", "rtx-3090"),
        ("RTX4090", "rtx-4090"),
        ("GeForce RTX 5090", "rtx-5090"),
        ("MI355X", "mi355x"),
    ],
)
def test_gpus_are_called_as_people_call_them(text, name):
    assert Gpu.parse(text).name == name


def test_concurrency_has_the_decimals_that_requests_do_not():
    deployment = Deployment(model="llama-3.1-8b")
    found = sized(deployment, usable=USABLE, weights=LLAMA_8B, tokens=8192)
    slabs = (USABLE - LLAMA_8B) // LLAMA_ROW - 1
    assert found.concurrency == slabs / 512
    assert found.max_requests == int(found.concurrency)
