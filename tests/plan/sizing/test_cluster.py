"""Sizing: weights and cache on GPUs, against arithmetic done by hand and published logs."""

from functools import partial

import pytest

from kvstow.errors import PlanError
from kvstow.plan.sizing.capacity import concurrency, max_requests
from kvstow.plan.sizing.cluster import GPUS, VOCABULARIES, Engine, Gpu, Load, clusters, sized
from kvstow.plan.sizing.plan import Deployment, plan_model
from kvstow.plan.sizing.reports import SizeQuestion, SizeReport, size_report
from kvstow.plan.sizing.weights import Weights, model_weights

H100 = 81559 << 20
USABLE = int(H100 * 0.9)
LLAMA_8B = 16_060_000_000
USUAL = Load(tokens=8192)
LLAMA_ROW = 32 * 2 * 8 * 128 * 2 * 16  # all layers, keys and values of 16 tokens in bfloat16


def test_what_fits_is_the_rest_of_the_memory_in_whole_rows():
    found = sized(Deployment(model="llama-3.1-8b"), USUAL, usable=USABLE, weights=LLAMA_8B)
    slabs = (USABLE - LLAMA_8B) // LLAMA_ROW
    assert found.max_requests == (slabs - 1) // 512  # a slab is a row here, and one is nobody's
    assert found.num_gpus == 1
    assert found.limiting.request_bytes == 512 * LLAMA_ROW


def test_tensor_parallel_ranks_split_weights_and_heads_and_replicas_add_up():
    one = sized(Deployment(model="llama-3.1-8b", tp=8), USUAL, usable=USABLE, weights=LLAMA_8B)
    assert one.limiting.weights_bytes == LLAMA_8B // 8
    slabs = (USABLE - LLAMA_8B // 8) // (LLAMA_ROW // 8)
    assert one.max_requests == (slabs - 1) // 512
    three = sized(
        Deployment(model="llama-3.1-8b", tp=8), USUAL, usable=USABLE, weights=LLAMA_8B, dp=3
    )
    assert three.max_requests == 3 * one.max_requests
    assert three.num_gpus == 24


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (8, 1), (16, 2), (32, 4)])
def test_heads_are_repeated_on_ranks_beyond_their_number(tp, copies):
    found = sized(Deployment(model="llama-3.1-8b", tp=tp), USUAL, usable=USABLE, weights=LLAMA_8B)
    assert found.head_copies == copies
    assert found.limiting.request_bytes == 512 * LLAMA_ROW // min(tp, 8)


def test_the_stage_with_the_most_layers_limits():
    found = sized(Deployment(model="llama-3.1-8b", pp=5), USUAL, usable=USABLE, weights=0)
    assert [stage.layers for stage in found.stages] == [6, 6, 7, 7, 6]
    assert found.limiting.rank == 2
    each = [((USABLE // (LLAMA_ROW * n // 32)) - 1) // 512 for n in (6, 6, 7, 7, 6)]
    assert [stage.requests for stage in found.stages] == each
    assert found.max_requests == min(each)


def test_weights_are_split_by_the_layers_of_a_stage():
    found = sized(
        Deployment(model="llama-3.1-8b", pp=5), Load(tokens=16), usable=USABLE, weights=3200
    )
    assert [stage.weights_bytes for stage in found.stages] == [600, 600, 700, 700, 600]


@pytest.mark.parametrize("weights", [USABLE, H100, 10 * H100])
def test_nothing_fits_beside_weights_that_fill_the_gpu(weights):
    found = sized(Deployment(model="llama-3.1-8b"), Load(tokens=1), usable=USABLE, weights=weights)
    assert found.max_requests == 0


@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v4-flash", "jamba-mini"]
)
@pytest.mark.parametrize("requests", [1, 2, 37])
def test_a_load_fits_into_what_it_needs_and_not_into_a_slab_less(model, requests):
    need = sized(Deployment(model=model), Load(tokens=5000, requests=requests), weights=0)
    one = plan_model(model, num_slabs=2).layout
    num_slabs = need.fullest.cache_bytes // one.slab_bytes
    assert plan_model(model, num_slabs=num_slabs).max_requests(tokens=5000) >= requests
    if num_slabs > 2:
        assert plan_model(model, num_slabs=num_slabs - 1).max_requests(tokens=5000) < requests


def test_the_smallest_cluster_comes_first_and_carries_the_load():
    weights = 141_000_000_000
    found = clusters(
        Deployment(model="llama-3.1-70b"),
        Load(tokens=8192, requests=200),
        usable=lambda tp: USABLE,
        weights=weights,
        kv_dtypes=(None, "fp8"),
    )
    assert [each.num_gpus for each in found] == sorted(each.num_gpus for each in found)
    assert all(each.max_requests >= 200 for each in found)
    best = found[0]
    for tp in (1, 2, 4, 8):  # no split with fewer GPUs does it, tried one by one
        for kv_dtype in (None, "fp8"):
            deployment = Deployment(model="llama-3.1-70b", tp=tp, kv_dtype=kv_dtype)
            one = sized(deployment, USUAL, usable=USABLE, weights=weights)
            dp = (best.num_gpus - 1) // tp
            assert one.max_requests * dp < 200


def test_replicas_that_share_their_experts_carry_what_latents_on_every_rank_cannot():
    """DeepSeek-V3 on 8 GPUs: attention on each of them, and an eighth of the experts."""
    weights = model_weights("deepseek-v3")
    experts = round(weights.nbytes * weights.expert_part)
    search = partial(
        clusters,
        Deployment(model="deepseek-v3"),
        Load(tokens=8192, requests=400),
        usable=lambda tp: 120 << 30,
        weights=weights.nbytes,
        kv_dtypes=(None,),
        pps=(1,),
    )
    whole, shared = search(), search(experts=experts)
    assert not any(each.shares_experts for each in whole)
    best = shared[0]
    assert (best.shares_experts, best.deployment.tp, best.dp) == (True, 1, 8)
    assert best.num_gpus < whole[0].num_gpus
    others = weights.nbytes - experts
    assert best.limiting.weights_bytes == pytest.approx(others + experts / 8, abs=1)
    assert best.max_requests == 8 * best.limiting.requests >= 400


def test_a_prefix_that_all_share_is_there_once():
    """8,192 tokens are 512 rows of one slab each; all but the first request lack 256 of them."""
    layout = plan_model("llama-3.1-8b", num_slabs=1 + 512 + 9 * 256).layout
    assert max_requests(layout, 8192) == 5
    assert max_requests(layout, 8192, 4096 + 15) == 10
    assert concurrency(layout, 8192, 4096) == 10
    with pytest.raises(PlanError, match=r"8,192 tokens cannot all begin with the same 8,192"):
        Load(tokens=8192, shared_tokens=8192)


def test_a_window_shares_nothing_that_it_has_left():
    layout = plan_model("gpt-oss-20b", num_slabs=4096).layout
    long, shared = max_requests(layout, 32768), max_requests(layout, 32768, 16384)
    assert long < shared < 2 * long + 1


def test_no_cluster_is_found_where_no_split_has_room():
    found = clusters(
        Deployment(model="llama-3.1-8b"),
        Load(tokens=8192, requests=1),
        usable=lambda tp: 1 << 20,
        weights=LLAMA_8B,
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
    found = sized(deployment, USUAL, usable=USABLE, weights=LLAMA_8B)
    slabs = (USABLE - LLAMA_8B) // LLAMA_ROW - 1
    assert found.concurrency == slabs / 512
    assert found.max_requests == int(found.concurrency)


# ── what vLLM leaves for the cache, held against logs ─────────────────────────────────────

GIB = 1 << 30

# Model, GPU, options, tp; "Available KV cache memory" or what "is reserved for KV cache", in GiB.
LOGS = [
    # https://github.com/vllm-project/vllm/pull/10511: total_gpu_memory 79.22GiB, weights 14.96,
    # non_torch_memory 1.79, activation peak 1.26; that version ran 256 requests at most
    ("llama-3-8b", None, "h100", Engine(max_num_seqs=256), 1, 53.29),
    # https://github.com/vllm-project/vllm/issues/21348: 178,880 tokens
    ("qwen3-235b-a22b", "fp8", "h100", Engine(), 4, 8.11),
    # https://github.com/vllm-project/vllm/issues/27508
    ("gpt-oss-120b", None, "h100", Engine(utilization=0.95, max_batched_tokens=1024), 1, 1.71),
    # https://github.com/vllm-project/vllm/issues/23278: "Model loading took 65.9651 GiB"
    ("gpt-oss-120b", None, "h100", Engine(), 1, -2.14),
    # https://myoceane.fr/index.php/ai-vllm-a100-gemma-4/, vLLM 0.19: "Model loading took 13.72 GiB"
    ("gpt-oss-20b", None, "a100-80", Engine(utilization=0.65), 1, 36.56),
    # https://github.com/vllm-project/vllm/issues/15815: total_gpu_memory 44.42GiB, weights 30.71,
    # non_torch_memory 0.30, activation peak 1.26
    ("qwen2.5-32b", None, "l40s", Engine(), 2, 7.71),
    # https://github.com/vllm-project/vllm/issues/12529: total_gpu_memory 7.75GiB, weights 3.34
    ("qwen2.5-1.5b", None, "8GiB", Engine(), 1, 2.20),
]


def report(model: str, dtype: str | None, gpu: str, engine: Engine, tp: int) -> SizeReport:
    question = SizeQuestion(
        deployment=Deployment(model=model, tp=tp),
        weights=model_weights(model, dtype),
        load=Load(tokens=1024),
        gpu=Gpu.parse(gpu),
        engine=engine,
    )
    return size_report(question)


@pytest.mark.parametrize(("model", "dtype", "gpu", "engine", "tp", "logged"), LOGS)
def test_the_cache_of_published_logs_is_within_the_range(model, dtype, gpu, engine, tp, logged):
    found = report(model, dtype, gpu, engine, tp)
    low, high = found.figures["cache_bytes"]
    assert low / GIB <= logged <= high / GIB
    assert high - low < 11 * GIB


def test_tokens_and_concurrency_are_those_of_the_log():
    """https://github.com/vllm-project/vllm/issues/21348: 8.11 GiB are 178,880 tokens."""
    known = Engine(name="none", utilization=1.0)
    question = SizeQuestion(
        deployment=Deployment(model="qwen3-235b-a22b", tp=4),
        weights=Weights(nbytes=0, how="as given"),
        load=Load(tokens=1024),
        gpu=Gpu("8.11GiB", int(8.11 * GIB)),
        engine=known,
    )
    found = size_report(question)
    kv_tokens, concurrency = found.figures["kv_tokens"][0], found.figures["concurrency"][0]
    assert kv_tokens == pytest.approx(178_880, rel=0.02)
    assert concurrency == pytest.approx(kv_tokens / 1024, abs=0.01)


def test_what_is_said_of_the_engine_is_taken_and_what_it_cannot_be_is_refused():
    found = report("llama-3-8b", None, "h100", Engine(reserve=3 * GIB), 1)
    assert len(set(found.figures["cache_bytes"])) == 1
    bare = report("llama-3-8b", None, "h100", Engine(name="none", utilization=1.0), 1)
    assert bare.figures["cache_bytes"][0] == (81559 << 20) - bare.question.weights.nbytes
    for wrong in ({"utilization": 1.5}, {"name": "vlm"}, {"max_batched_tokens": 0}):
        with pytest.raises(PlanError):
            Engine(**wrong)


def test_more_tokens_per_step_leave_less_for_the_cache():
    few, many = (
        report("llama-3-8b", None, "h100", Engine(max_batched_tokens=tokens), 1).figures
        for tokens in (2048, 65536)
    )
    assert few["cache_bytes"][0] > many["cache_bytes"][0]


def test_vocabularies_are_those_of_the_configuration_classes():
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    assert {kind: mapping[kind]().vocab_size for kind in VOCABULARIES} == VOCABULARIES
