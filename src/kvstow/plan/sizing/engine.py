"""What vLLM takes of a GPU beside weights and cache, term by term, from low to high.

    visible      what CUDA sees: less than the card's label says
    share        visible × utilization; what follows comes out of it
    weights      of one rank
    activations  of one step of so many tokens
    sampling     the logits of as many requests as may run, and what sampling makes of them
    outside      what PyTorch does not manage: the CUDA context, NCCL between tensor-parallel ranks
    graphs       CUDA graphs: in the share since vLLM 0.21
    cache        the rest

vLLM measures the four in the middle when it starts. Nobody can compute them exactly without
running it, so each is a range; tests/plan/sizing/test_engine.py holds them against logs.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from kvstow.errors import PlanError
from kvstow.plan.models.config import Config
from kvstow.plan.view import align_up, ceil_div, check_count

EngineName = Literal["vllm", "none"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

HIDDEN_BYTES = 1 << 29
"""What CUDA does not see of a GPU's memory, about: 0.45 to 0.8 GiB in published logs."""

LARGE_BYTES = 70 << 30
"""From this memory on vLLM computes more tokens per step, for more requests; not on an A100."""

LOGIT_BYTES = (12, 34)
"""Per logit: in two dtypes, and its probability; sorted with indices as PyTorch's sampler does."""

OUTSIDE_BYTES = (1 << 28, 7 << 28)
RANK_OUTSIDE_BYTES = (0, 7 << 28)
"""The same, further, where several tensor-parallel ranks talk."""

GRAPH_BYTES = (0, 1 << 30)

VOCABULARIES = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_next"), 151_936),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "deepseek_v4"), 129_280),
    "gemma2": 256_000,
    "gemma3_text": 262_208,
    "gpt_oss": 201_088,
    "llama4_text": 202_048,
}
"""By model type, where a configuration does not say: the defaults of transformers' classes."""
USUAL_VOCABULARY = 160_000
"""Of all others."""

MXFP4_MULTIPLE = 256
"""The kernels that read MXFP4 experts pad their inner sizes to multiples of so many elements."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine's options that decide how much memory is left for the cache.

    `reserve` are the bytes beside weights and cache, where they are known.
    """

    name: EngineName = "vllm"
    utilization: float = 0.9
    max_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    reserve: int | None = None

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise PlanError(f"engine {self.name!r} is none of {', '.join(ENGINES)}")
        if not 0 < self.utilization <= 1:
            raise PlanError(f"utilization is {self.utilization!r}, not above 0 and at most 1")
        for what in ("max_batched_tokens", "max_num_seqs"):
            if getattr(self, what) is not None:
                check_count(what, getattr(self, what), error=PlanError)

    def share(self, gpu_bytes: int) -> int:
        """The bytes that weights, cache and everything else may take together."""
        hidden = HIDDEN_BYTES if self.name == "vllm" else 0
        return int((gpu_bytes - hidden) * self.utilization)

    def loaded(self, config: Config, weights: int) -> int:
        """What weights of so many bytes take once they are loaded."""
        if self.name == "none" or config.model_type != "gpt_oss":
            return weights
        inner = config.count("intermediate_size", "hidden_size")
        return weights * align_up(inner, MXFP4_MULTIPLE) // inner

    def batch(self, gpu: str, gpu_bytes: int) -> tuple[int, int]:
        """Tokens of one step, and requests that may run, as vLLM's server chooses them."""
        is_large = gpu_bytes >= LARGE_BYTES and "a100" not in gpu.lower()
        tokens, seqs = (8192, 1024) if is_large else (2048, 256)
        tokens = self.max_batched_tokens or tokens
        return tokens, min(self.max_num_seqs or seqs, tokens)

    def overhead(self, config: Config, *, tp: int, gpu: str, gpu_bytes: int) -> dict[str, Range]:
        """What is neither weights nor cache, by term; empty where the engine has none."""
        if self.reserve is not None:
            return {"reserve": (self.reserve, self.reserve)}
        if self.name == "none":
            return {}
        tokens, seqs = self.batch(gpu, gpu_bytes)
        step = 2 * tokens * _step_elements(config, tp)
        logits = seqs * _vocabulary(config)
        extra = RANK_OUTSIDE_BYTES if tp > 1 else (0, 0)
        return {
            "activations": (step, 2 * step),
            "sampling": (LOGIT_BYTES[0] * logits, LOGIT_BYTES[1] * logits),
            "outside": (OUTSIDE_BYTES[0] + extra[0], OUTSIDE_BYTES[1] + extra[1]),
            "graphs": GRAPH_BYTES,
        }


VLLM = Engine()


def _vocabulary(config: Config) -> int:
    usual = VOCABULARIES.get(config.model_type, USUAL_VOCABULARY)
    return config.count("vocab_size", default=usual)


def _step_elements(config: Config, tp: int) -> int:
    """Elements of a token that are in memory together, in the widest part of a layer.

    The residual and the layer's input and output; gate, up and their product of a feed-forward,
    or of each expert that the token is sent to, with its input and output.
    """
    width = config.count("hidden_size", "n_embd", "d_model", default=4096)
    experts = config.count("num_experts_per_tok", "num_experts_per_token", default=0, least=0)
    inner = config.count("intermediate_size", "n_inner", "d_ff", default=4 * width)
    if experts:
        each = config.count("moe_intermediate_size", default=inner)
        return 3 * width + experts * (3 * ceil_div(each, tp) + width)
    return 3 * width + 3 * ceil_div(inner, tp)
