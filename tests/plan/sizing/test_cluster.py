"""Sizing: weights and cache on GPUs, against arithmetic done by hand and published logs."""

from dataclasses import replace
from fractions import Fraction

import pytest

from kvstow.errors import PlanError
from kvstow.plan.sizing.capacity import concurrency, max_requests
from kvstow.plan.sizing.cluster import GPUS, Engine, Gpu, SizeQuestion, Sizing
from kvstow.plan.sizing.plan import Deployment, plan_model
from kvstow.plan.sizing.reports import SizeReport, size_report
from kvstow.plan.sizing.weights import VOCABULARIES, Weights, model_weights

H100 = 81559 << 20
USABLE = int(H100 * 0.9)
LLAMA_8B = 16_060_000_000
ALL = Engine(name="none", utilization=1.0)
LLAMA_ROW = 32 * 2 * 8 * 128 * 2 * 16  # all layers, keys and values of 16 tokens in bfloat16


def question(model: str, *, weights=LLAMA_8B, tokens: int = 8192, **others) -> SizeQuestion:
    """On GPUs of `USABLE` bytes, of which the engine takes none."""
    if isinstance(weights, int):
        weights = Weights(nbytes=weights, how="as given")
    mine = {"tp", "pp", "kv_dtype"} & others.keys()
    return SizeQuestion(
        deployment=Deployment(model=model, **{name: others.pop(name) for name in mine}),
        **{"weights": weights, "tokens": tokens} | {"gpu": Gpu("", USABLE), "engine": ALL} | others,
    )


def sized(model: str = "llama-3.1-8b", **others) -> Sizing:
    return question(model, **others).sized(USABLE)


def test_what_fits_is_the_rest_of_the_memory_in_whole_rows():
    found = sized()
    slabs = (USABLE - LLAMA_8B) // LLAMA_ROW
    assert found.max_requests == (slabs - 1) // 512  # a slab is a row here, and one is nobody's
    assert found.num_gpus == 1
    assert found.limiting.request_bytes == 512 * LLAMA_ROW


def test_tensor_parallel_ranks_split_weights_and_heads_and_replicas_add_up():
    one = sized(tp=8)
    assert one.limiting.weights_bytes == LLAMA_8B // 8
    slabs = (USABLE - LLAMA_8B // 8) // (LLAMA_ROW // 8)
    assert one.max_requests == (slabs - 1) // 512
    three = sized(tp=8, dp=3)
    assert three.max_requests == 3 * one.max_requests
    assert three.num_gpus == 24


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (8, 1), (16, 2), (32, 4)])
def test_heads_are_repeated_on_ranks_beyond_their_number(tp, copies):
    found = sized(tp=tp)
    assert found.head_copies == copies
    assert found.limiting.request_bytes == 512 * LLAMA_ROW // min(tp, 8)


def test_the_stage_with_the_most_layers_limits():
    found = sized(pp=5, weights=0)
    assert [stage.layers for stage in found.stages] == [6, 6, 7, 7, 6]
    assert found.limiting.rank == 2
    each = [((USABLE // (LLAMA_ROW * n // 32)) - 1) // 512 for n in (6, 6, 7, 7, 6)]
    assert [stage.requests for stage in found.stages] == each
    assert found.max_requests == min(each)


def test_weights_are_split_by_the_layers_of_a_stage():
    found = sized(pp=5, tokens=16, weights=3200)
    assert [stage.weights_bytes for stage in found.stages] == [600, 600, 700, 700, 600]


@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v4-flash", "jamba-mini"]
)
@pytest.mark.parametrize("requests", [1, 2, 37])
def test_a_load_fits_into_what_it_needs_and_not_into_a_slab_less(model, requests):
    need = question(model, tokens=5000, requests=requests, weights=0).sized(None)
    one = plan_model(model, num_slabs=2).layout
    num_slabs = need.fullest.cache_bytes // one.slab_bytes
    assert plan_model(model, num_slabs=num_slabs).max_requests(tokens=5000) >= requests
    if num_slabs > 2:
        assert plan_model(model, num_slabs=num_slabs - 1).max_requests(tokens=5000) < requests


def test_the_smallest_cluster_comes_first_and_carries_the_load():
    weights = 141_000_000_000
    one = question("llama-3.1-70b", weights=weights, requests=200, kv_dtypes=(None, "fp8"))
    found = one.clusters()
    assert [each.num_gpus for each in found] == sorted(each.num_gpus for each in found)
    assert all(each.max_requests >= 200 for each in found)
    best = found[0]
    for tp in (1, 2, 4, 8):  # no split with fewer GPUs does it, tried one by one
        for kv_dtype in (None, "fp8"):
            one = sized("llama-3.1-70b", tp=tp, kv_dtype=kv_dtype, weights=weights)
            dp = (best.num_gpus - 1) // tp
            assert one.max_requests * dp < 200


def test_replicas_that_share_their_experts_carry_what_latents_on_every_rank_cannot():
    """DeepSeek-V3 on 8 GPUs: attention on each of them, and an eighth of the experts."""
    weights = model_weights("deepseek-v3")
    experts = weights.nbytes * weights.expert_part
    one = question("deepseek-v3", weights=weights, requests=400, pps=(1,), gpu=Gpu("", 120 << 30))
    none = replace(weights, expert_part=Fraction(0))
    whole, shared = replace(one, weights=none).clusters(), one.clusters()
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
        question("llama-3.1-8b", shared_tokens=8192)


def test_a_window_shares_nothing_that_it_has_left():
    layout = plan_model("gpt-oss-20b", num_slabs=4096).layout
    long, shared = max_requests(layout, 32768), max_requests(layout, 32768, 16384)
    assert long < shared < 2 * long + 1


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
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("v100", "v100-16"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        *((name, name) for name in ("a10g", "l40", "h800")),
    ],
)
def test_gpus_are_called_as_people_call_them(text, name):
    assert Gpu.parse(text).name == name


# ── what vLLM leaves for the cache, held against logs ─────────────────────────────────────

GIB = 1 << 30

# Model, GPU, options, tp; "Available KV cache memory" or what "is reserved for KV cache", in GiB.
LOGS = [
    # https://github.com/vllm-project/vllm/pull/10511: total_gpu_memory 79.22GiB, weights 14.96,
    # non_torch_memory 1.79, activation peak 1.26; that version ran 256 requests at most, and the
    # figure is within the range of today's default too
    ("llama-3-8b", None, "h100", Engine(utilization=0.9, max_num_seqs=256), 1, 53.29),
    ("llama-3-8b", None, "h100", Engine(utilization=0.9), 1, 53.29),
    # https://github.com/vllm-project/vllm/issues/21348: 178,880 tokens
    ("qwen3-235b-a22b", "fp8", "h100", Engine(utilization=0.9), 4, 8.11),
    # https://github.com/vllm-project/vllm/issues/27508
    ("gpt-oss-120b", None, "h100", Engine(utilization=0.95, max_batched_tokens=1024), 1, 1.71),
    # https://github.com/vllm-project/vllm/issues/23278: "Model loading took 65.9651 GiB"
    ("gpt-oss-120b", None, "h100", Engine(utilization=0.9), 1, -2.14),
    # https://myoceane.fr/index.php/ai-vllm-a100-gemma-4/, vLLM 0.19: "Model loading took 13.72 GiB"
    ("gpt-oss-20b", None, "a100-80", Engine(utilization=0.65), 1, 36.56),
    # https://github.com/vllm-project/vllm/issues/15815: total_gpu_memory 44.42GiB, weights 30.71,
    # non_torch_memory 0.30, activation peak 1.26
    ("qwen2.5-32b", None, "l40s", Engine(utilization=0.9), 2, 7.71),
    # https://docs.vllm.ai/projects/recipes/en/latest/moonshotai/Kimi-K2-Think.html: 715,072 tokens
    # on 8 × H200, INT4 experts; that version's default is 0.9
    ("kimi-k2-thinking", None, "h200", Engine(utilization=0.9), 8, 46.80),
    # https://github.com/vllm-project/vllm/issues/12529: total_gpu_memory 7.75GiB, weights 3.34
    ("qwen2.5-1.5b", None, "8GiB", Engine(utilization=0.9), 1, 2.20),
]


def report(model: str, dtype: str | None, gpu: str, engine: Engine, tp: int) -> SizeReport:
    one = SizeQuestion(
        deployment=Deployment(model=model, tp=tp),
        weights=model_weights(model, dtype),
        tokens=1024,
        gpu=Gpu.parse(gpu),
        engine=engine,
    )
    return size_report(one)


@pytest.mark.parametrize(("model", "dtype", "gpu", "engine", "tp", "logged"), LOGS)
def test_the_cache_of_published_logs_is_within_the_range(model, dtype, gpu, engine, tp, logged):
    found = report(model, dtype, gpu, engine, tp)
    low, high = found.figures["cache_bytes"]
    assert low / GIB <= logged <= high / GIB
    assert high - low < 11 * GIB


@pytest.mark.parametrize(
    ("model", "tp", "gib", "tokens"),
    [("qwen3-235b-a22b", 4, 8.11, 178_880), ("kimi-k2-thinking", 8, 46.80, 715_072)],
)
def test_tokens_and_concurrency_are_those_of_the_log(model, tp, gib, tokens):
    """Of the same logs."""
    one = SizeQuestion(
        deployment=Deployment(model=model, tp=tp),
        weights=Weights(nbytes=0, how="as given"),
        tokens=1024,
        gpu=Gpu(f"{gib}GiB", int(gib * GIB)),
        engine=ALL,
    )
    found = size_report(one)
    kv_tokens, concurrency = found.figures["kv_tokens"][0], found.figures["concurrency"][0]
    assert kv_tokens == pytest.approx(tokens, rel=0.02)
    assert concurrency == pytest.approx(kv_tokens / 1024, abs=0.01)


@pytest.mark.parametrize(
    ("model", "tp", "gib", "concurrency", "tokens"),
    [  # as vLLM 0.32 counts them for requests of 8,192 tokens, in steps of as many
        ("gpt-oss-20b", 1, 46.94, 125.05, 1_024_415),
        ("gemma-3-27b", 1, 6.48, 1.48, 12_112),
        ("llama-3.1-70b", 4, 27.17, 43.47, 356_112),
    ],
)
def test_blocks_are_counted_as_vllm_counts_them(model, tp, gib, concurrency, tokens):
    engine = Engine(max_batched_tokens=8192, utilization=1.0, async_scheduling=False)
    one = replace(question(model, tp=tp, weights=0), engine=engine)
    counts = one.sized(int(gib * GIB)).concurrency
    assert counts == pytest.approx(concurrency, abs=0.005)
    assert int(counts * 8192) == pytest.approx(tokens, rel=1e-4)


def test_a_step_that_is_planned_ahead_reserves_more_of_windows():
    """One of 1,023 + 2,048 tokens, or of 1,023 + 4,096, in 6 of 7 groups."""
    one = question("gemma-3-27b", tokens=16384, weights=0)
    ahead, not_ahead = (
        replace(one, engine=Engine(max_batched_tokens=2048, async_scheduling=is_async)).sized(
            64 * GIB
        )
        for is_async in (True, False)
    )
    blocks = (64 * GIB) // (10 * 131072)
    assert ahead.concurrency == blocks / (1024 + 6 * (5119 // 16 + 2))
    assert not_ahead.concurrency == blocks / (1024 + 6 * (3071 // 16 + 2))


def test_states_and_a_checkpoint_are_counted_in_blocks_as_long_as_a_state():
    one = replace(question("qwen3-next-80b", weights=0), engine=Engine())
    page = 16 * 2 * 2 * 256 * 2 * 34  # 544 tokens of 2 kv heads, no shorter than a state
    blocks = (40 * GIB) // (12 * page)
    assert one.sized(40 * GIB).concurrency == blocks / (16 + 3 * 2)


def test_what_is_said_of_the_engine_is_taken_and_what_it_cannot_be_is_refused():
    found = report("llama-3-8b", None, "h100", Engine(reserve=3 * GIB), 1)
    assert len(set(found.figures["cache_bytes"])) == 1
    bare = report("llama-3-8b", None, "h100", ALL, 1)
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
