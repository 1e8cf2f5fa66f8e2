"""What vLLM leaves for the cache, held against logs that people published."""

import pytest

from kvstow.errors import PlanError
from kvstow.plan.models.weights import Weights, model_weights
from kvstow.plan.sizing.answers import FitReport, SizeQuestion
from kvstow.plan.sizing.cluster import Gpu
from kvstow.plan.sizing.engine import VOCABULARIES, Engine
from kvstow.plan.sizing.plan import Deployment

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


def report(model: str, dtype: str | None, gpu: str, engine: Engine, tp: int) -> FitReport:
    question = SizeQuestion(
        deployment=Deployment(model=model, tp=tp),
        weights=model_weights(model, dtype),
        tokens=1024,
        gpu=Gpu.parse(gpu),
        engine=engine,
    )
    return FitReport.of(question)


@pytest.mark.parametrize(("model", "dtype", "gpu", "engine", "tp", "logged"), LOGS)
def test_the_cache_of_published_logs_is_within_the_range(model, dtype, gpu, engine, tp, logged):
    found = report(model, dtype, gpu, engine, tp)
    low, high = found.low.limiting.cache_bytes, found.high.limiting.cache_bytes
    assert low / GIB <= logged <= high / GIB
    assert high - low < 11 * GIB


def test_tokens_and_concurrency_are_those_of_the_log():
    """https://github.com/vllm-project/vllm/issues/21348: 8.11 GiB are 178,880 tokens."""
    known = Engine(name="none", utilization=1.0)
    question = SizeQuestion(
        deployment=Deployment(model="qwen3-235b-a22b", tp=4),
        weights=Weights(nbytes=0, how="as given"),
        tokens=1024,
        gpu=Gpu("8.11GiB", int(8.11 * GIB)),
        engine=known,
    )
    found = FitReport.of(question)
    assert found.kv_tokens[0] == pytest.approx(178_880, rel=0.02)
    assert found.low.concurrency == pytest.approx(found.kv_tokens[0] / 1024, abs=0.01)


def test_what_is_said_of_the_engine_is_taken_and_what_it_cannot_be_is_refused():
    found = report("llama-3-8b", None, "h100", Engine(reserve=3 * GIB), 1)
    assert found.low == found.high
    bare = report("llama-3-8b", None, "h100", Engine(name="none", utilization=1.0), 1)
    assert bare.low.limiting.cache_bytes == (81559 << 20) - bare.question.weights.nbytes
    for wrong in ({"utilization": 1.5}, {"name": "vlm"}, {"max_batched_tokens": 0}):
        with pytest.raises(PlanError):
            Engine(**wrong)


def test_more_tokens_per_step_leave_less_for_the_cache():
    few, many = (
        report("llama-3-8b", None, "h100", Engine(max_batched_tokens=tokens), 1).low
        for tokens in (2048, 65536)
    )
    assert few.limiting.cache_bytes > many.limiting.cache_bytes


def test_vocabularies_are_those_of_the_configuration_classes():
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    assert {kind: mapping[kind]().vocab_size for kind in VOCABULARIES} == VOCABULARIES
