"""GPUs: what an engine leaves of them to the cache, how many requests fit, what a load needs.

    visible      what CUDA sees: less than the card's label says
    share        visible × utilization; what follows comes out of it
    weights      bytes of all weights × layers of the stage / all layers / tp: an estimate
    activations  of one step of so many tokens
    sampling     the logits of as many requests as may run, and what sampling makes of them
    outside      what PyTorch does not manage: the CUDA context, NCCL between ranks
    graphs       CUDA graphs: in the share since vLLM 0.21
    cache        the rest, on each rank; the plan of that memory tells what fits

vLLM measures activations, sampling, outside and graphs when it starts. Nobody can compute them
exactly without running it, so each is a range, from low to high;
tests/plan/sizing/test_cluster.py holds them against logs.

A request lives on all ranks of a replica at once, so the fullest rank limits. Tensor-parallel
ranks of one stage hold equally much, so one of them is planned. `dp` are whole replicas, or, with
expert parallelism, replicas of everything but the experts, which all of them share.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fractions import Fraction
from functools import cached_property, partial
from itertools import islice, product
from math import ceil
from typing import Literal, get_args

from kvstow.errors import KvstowError, PlanError
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.models.config import Config
from kvstow.plan.retention import State
from kvstow.plan.sizing.capacity import (
    concurrency,
    max_requests,
    request_bytes,
    slabs_needed,
    vllm_concurrency,
)
from kvstow.plan.sizing.plan import Deployment, Plan
from kvstow.plan.sizing.weights import Weights, vocabulary
from kvstow.plan.view import align_up, ceil_div, check_count, parse_size

# fmt: off
_MEBIBYTES = {
    "a10": 23028, "a100-40": 40960, "a100-80": 81920, "a10g": 23028, "a30": 24576, "a6000": 49140,
    "b200": 183359, "b300": 275040, "gb200": 189471, "gb300": 284208, "gh200": 97871,
    "h100": 81559, "h100-nvl": 95830, "h100-pcie": 81559, "h20": 97871, "h200": 143771,
    "h800": 81559, "l4": 23034, "l40": 46068, "l40s": 46068, "mi300x": 196592, "mi325x": 262128,
    "mi355x": 294896, "rtx-3090": 24576, "rtx-4090": 24564, "rtx-5090": 32607,
    "rtx-pro-6000": 97887, "t4": 15360, "v100-16": 16384, "v100-32": 32768,
}
# fmt: on
GPUS = {name: size << 20 for name, size in _MEBIBYTES.items()}
"""Bytes of memory, about as the driver's own tool reports them.

Compared with reports of nvidia-smi: a10, a100-40, a100-80, h100, l4, l40s, t4 (modal-labs/
modal-client#2797), rtx-4090 (vllm-project/vllm#7553), and in several public repositories a10g,
h100-nvl, h100-pcie, l40, v100-16 and v100-32; in one h800. b200 is within 1 % of what CUDA reports
(pytorch/ao#4002). The others are not checked.
"""

LEAST_BYTES = 1 << 30
"""No GPU has less memory: a size below it lacks its unit."""

SPELLINGS = {
    "a100": "a100-80",
    "h100-80": "h100",
    "gh200-480": "gh200",
    "rtx-a6000": "a6000",
    "v100": "v100-16",
}

_NOISE = re.compile(
    r"nvidia|tesla|geforce|amd|instinct|blackwell|server|workstation|edition|sxm\d?|hbm\d\w?"
)
"""Words that a GPU's full name has beside."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as somebody called it, and its memory."""

    name: str
    nbytes: int

    @staticmethod
    def parse(text: str) -> "Gpu":
        """`h100`, `A100 80GB`, `NVIDIA H100 80GB HBM3`, `RTX 3090` …, or one that has that memory,
        such as `80GiB`."""
        words = re.split(r"[\s_-]+", text.strip().lower())
        name = "-".join(
            re.sub(r"^(\d+)gb$", r"\1", word) for word in words if not _NOISE.fullmatch(word)
        )
        name = re.sub(r"^rtx-?(?=\d)", "rtx-", name)
        for each in (name, name.replace("-pcie", "")):
            each = SPELLINGS.get(each, each)
            if each in GPUS:
                return Gpu(each, GPUS[each])
        if not name[:1].isdigit():
            close = get_close_matches(name, GPUS, n=3, cutoff=0.5)
            raise PlanError(
                f"{text!r} is not a known GPU\n\nhint: "
                + (f"did you mean {', '.join(close)}? " if close else f"one of {', '.join(GPUS)}, ")
                + "or its memory, such as 80GiB"
            )
        nbytes = parse_size(text)
        if nbytes < LEAST_BYTES:
            called = f"rtx-{text.strip()}"
            raise PlanError(
                f"a GPU of {text!r} has {nbytes:,} bytes, fewer than {LEAST_BYTES:,}\n\nhint: "
                + (f"did you mean {called}? Else " if called in GPUS else "")
                + "give the unit too, such as 80GiB"
            )
        return Gpu(text.strip(), nbytes)


NO_GPU = Gpu("GPU", 0)
"""Of a question that names none."""


# ── what an engine takes beside weights and cache ─────────────────────────────────────

EngineName = Literal["vllm", "none"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

HIDDEN_BYTES = 1 << 29
"""What CUDA does not see of a GPU's memory, about: 0.45 to 0.8 GiB in published logs."""

LARGE_BYTES = 70 << 30
"""From this memory on vLLM computes more tokens per step, for more requests; not on an A100."""

LARGEST_BYTES = 160 << 30
"""From this memory on it computes the most."""

LOGIT_BYTES = (12, 34)
"""Per logit: in two dtypes, and its probability; sorted with indices as PyTorch's sampler does."""

OUTSIDE_BYTES = (1 << 28, 7 << 28)
RANK_OUTSIDE_BYTES = (0, 7 << 28)
"""The same, further, where several ranks talk."""

GRAPH_BYTES = (0, 1 << 30)

MXFP4_MULTIPLE = 256
"""The kernels that read MXFP4 experts pad their inner sizes to multiples of so many elements."""

Range = tuple[int, int]
"""At least, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine's options that decide how much memory is left for the cache.

    `reserve` are the bytes beside weights and cache, where they are known. With `async_scheduling`
    a step is planned while another one runs.
    """

    name: EngineName = "vllm"
    utilization: float = 0.92
    max_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    async_scheduling: bool = True
    reserve: int | None = None

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise PlanError(f"engine {self.name!r} is none of {', '.join(ENGINES)}")
        if not 0 < self.utilization <= 1:
            raise PlanError(f"utilization is {self.utilization!r}, not above 0 and at most 1")
        for what in ("max_batched_tokens", "max_num_seqs"):
            if getattr(self, what) is not None:
                check_count(what, getattr(self, what), error=PlanError)

    def share(self, gpu: Gpu) -> int:
        """The bytes that weights, cache and everything else may take together."""
        hidden = HIDDEN_BYTES if self.name == "vllm" else 0
        return int((gpu.nbytes - hidden) * self.utilization)

    def batch(self, gpu: Gpu) -> tuple[int, int]:
        """Tokens of one step, and requests that may run, as vLLM's server chooses them."""
        is_large = gpu.nbytes >= LARGE_BYTES and "a100" not in gpu.name.lower()
        tokens, seqs = (8192, 1024) if is_large else (2048, 256)
        if gpu.nbytes >= LARGEST_BYTES:
            tokens = 16384
        tokens = self.max_batched_tokens or tokens
        return tokens, min(self.max_num_seqs or seqs, tokens)


def _step_elements(config: Config, tp: int) -> int:
    """Elements of a token that are in memory together, in the widest part of a layer.

    The residual and the layer's input and output; gate, up and their product of a feed-forward,
    or of each expert that the token is sent to, with its input and output.
    """
    width = config.count("hidden_size", "n_embd", "d_model", default=4096)
    routed = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
    experts = config.count(*routed, default=0, least=0)
    inner = config.count("intermediate_size", "n_inner", "d_ff", default=4 * width)
    if experts:
        each = config.count("moe_intermediate_size", default=inner)
        return 3 * width + experts * (3 * ceil_div(each, tp) + width)
    return 3 * width + 3 * ceil_div(inner, tp)


# ── how many requests fit ─────────────────────────────────────────────────────────────

TP = (1, 2, 4, 8)
PP = (1, 2, 4, 8)
"""What is tried when the smallest cluster is searched."""

EXPERT_DP = (2, 4, 8, 16, 32, 64)
"""Replicas that are tried with experts shared out among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """The ranks `[rank, rank + tp)` of one pipeline stage: what each of them holds."""

    rank: int
    layers: int
    weights_bytes: int
    cache_bytes: int
    """On a GPU what is left, below 0 where the weights alone do not fit; for a load, its need."""
    request_bytes: int
    requests: int
    """As many as fit, and the engine runs."""
    concurrency: float
    """Whole requests of all their tokens with decimals, as the engine counts them."""
    own_requests: int
    """As many as fit into kvstow's own packing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A deployment on `dp` × `pp` × `tp` GPUs, and what fits.

    With `shares_experts`, every expert is on one GPU of all replicas, and attention on each.
    """

    deployment: Deployment
    kv_dtype: str
    dp: int
    shares_experts: bool
    stages: tuple[PipelineStage, ...]
    head_copies: int
    """Ranks that hold the same kv head: above 1, more `tp` adds no room for the cache."""

    @property
    def num_gpus(self) -> int:
        return self.deployment.num_ranks * self.dp

    @property
    def limiting(self) -> PipelineStage:
        """The stage on which the fewest requests fit; the first of several."""
        return min(self.stages, key=lambda stage: (stage.requests, stage.concurrency))

    @property
    def fullest(self) -> PipelineStage:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.weights_bytes + stage.cache_bytes)

    @property
    def concurrency(self) -> float:
        """Requests with decimals on each replica, as vLLM's log says it."""
        return min(stage.concurrency for stage in self.stages)

    @property
    def max_requests(self) -> int:
        """Requests that fit at once on all replicas together."""
        return self.dp * self.limiting.requests

    @property
    def own_requests(self) -> int:
        """Requests that fit into kvstow's own packing, on all replicas together."""
        return self.dp * min(stage.own_requests for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class SizeQuestion:
    """A model with its weights, the requests to serve, as many as fit without `requests`, and what
    serves them.

    All requests begin with the same `shared_tokens`; `output_tokens` are generated, so that on
    average a request holds half of them.
    """

    deployment: Deployment
    weights: Weights
    tokens: int
    output_tokens: int = 0
    shared_tokens: int = 0
    requests: int | None = None
    gpu: Gpu = NO_GPU
    engine: Engine = field(default_factory=Engine)
    kv_dtypes: tuple[str | None, ...] = (None,)
    dp: int | None = None
    tps: tuple[int, ...] = TP
    pps: tuple[int, ...] = PP
    requests_per_hour: int | None = None
    store_hours: int = 24

    def __post_init__(self) -> None:
        if not 0 <= self.shared_tokens < self.tokens:
            raise PlanError(
                f"requests of {self.tokens:,} tokens cannot all begin with the same "
                f"{self.shared_tokens:,}\n\nhint: share fewer tokens than a request has"
            )
        if not 0 <= self.output_tokens < self.tokens:
            raise PlanError(
                f"{self.output_tokens:,} of {self.tokens:,} tokens cannot be generated"
                "\n\nhint: --tokens counts prompt and output together"
            )

    @cached_property
    def config(self) -> Config:
        return self.deployment.facts()

    @property
    def loaded_bytes(self) -> int:
        """All weights, as the engine keeps them."""
        nbytes = self.weights.nbytes
        if self.engine.name == "none" or self.config.model_type != "gpt_oss":
            return nbytes
        inner = self.config.count("intermediate_size", "hidden_size")
        return nbytes * align_up(inner, MXFP4_MULTIPLE) // inner

    @property
    def mean_tokens(self) -> int:
        """Of a request that has generated half of its output."""
        return max(self.tokens - self.output_tokens // 2, 1)

    def overhead(self, *, shares_experts: bool = False) -> dict[str, Range]:
        """What is neither weights nor cache, by term; nothing without a GPU or an engine."""
        engine, split = self.engine, self.deployment
        if engine.reserve is not None and self.gpu is not NO_GPU:
            return {"reserve": (engine.reserve, engine.reserve)}
        if engine.name == "none" or self.gpu is NO_GPU:
            return {}
        tokens, seqs = engine.batch(self.gpu)
        step = 2 * tokens * _step_elements(self.config, split.tp)
        logits = seqs * vocabulary(self.config)
        talks = split.num_ranks > 1 or shares_experts
        extra = RANK_OUTSIDE_BYTES if talks else (0, 0)
        return {
            "activations": (step, 2 * step),
            "sampling": (LOGIT_BYTES[0] * logits, LOGIT_BYTES[1] * logits),
            "outside": (OUTSIDE_BYTES[0] + extra[0], OUTSIDE_BYTES[1] + extra[1]),
            "graphs": GRAPH_BYTES,
        }

    def usable(self, *, shares_experts: bool = False) -> Range:
        """What a GPU has for weights and cache: at least, and at most."""
        share = self.engine.share(self.gpu)
        terms = self.overhead(shares_experts=shares_experts).values()
        return share - sum(high for _, high in terms), share - sum(low for low, _ in terms)

    def sized(
        self,
        usable: int | None,
        *,
        tokens: int | None = None,
        dp: int | None = None,
        shares_experts: bool = False,
    ) -> Sizing:
        """How many requests of so many `tokens` fit into `usable` bytes per GPU beside all the
        weights; without it, what every stage needs for the requests.

        A rank whose weights do not fit, or leave no room for two slabs, holds 0 requests. Raises
        ModelError for a model that cannot be split so.
        """
        tokens, dp = tokens or self.tokens, dp or self.dp or 1
        weights = Fraction(self.loaded_bytes)
        if shares_experts:
            weights -= weights * self.weights.expert_part * Fraction(dp - 1, dp)
        plans = replace(self.deployment, memory=None, num_slabs=2).stages()
        stages: list[PipelineStage] = []
        for each in plans:
            split = each.held.total_layers * self.deployment.tp
            share = ceil(weights * Fraction(each.held.stage_layers, split))
            layout = self._needed(each, dp) if usable is None else _in_memory(each, usable - share)
            own = 0 if layout is None else max_requests(layout, tokens, self.shared_tokens)
            fit = own, 0.0 if layout is None else concurrency(layout, self.tokens)
            if usable is not None and self.has_vllm_blocks:
                fit = self._in_blocks(each, max(0, usable - share), tokens)
            rows = layout or each.layout
            stages.append(
                PipelineStage(
                    rank=each.rank,
                    layers=each.held.stage_layers,
                    weights_bytes=share,
                    cache_bytes=rows.nbytes if usable is None else usable - share,
                    request_bytes=request_bytes(rows, tokens),
                    requests=min(fit[0], self.most_running or fit[0]),
                    concurrency=fit[1],
                    own_requests=own,
                )
            )
        return Sizing(
            deployment=self.deployment,
            kv_dtype=plans[0].kv_dtype,
            dp=dp,
            shares_experts=shares_experts,
            stages=tuple(stages),
            head_copies=_head_copies(plans[0]),
        )

    @property
    def most_running(self) -> int | None:
        """How many requests a replica runs at once; None without a limit that is known."""
        if self.engine.name == "none" or self.gpu is NO_GPU:
            return self.engine.max_num_seqs
        return self.engine.batch(self.gpu)[1]

    @property
    def has_vllm_blocks(self) -> bool:
        """Whether the cache is counted in vLLM's blocks; those of DeepSeek V4 are not known."""
        return self.engine.name == "vllm" and "compress_ratios" not in self.config

    def _in_blocks(self, plan: Plan, nbytes: int, tokens: int) -> tuple[int, float]:
        """Requests of so many tokens in vLLM's blocks, and its concurrency."""
        steps = self.deployment.pp + self.engine.async_scheduling
        in_flight = steps * self.engine.batch(self.gpu)[0]
        fit = partial(vllm_concurrency, plan.groups, nbytes, in_flight=in_flight)
        return int(fit(tokens, shared_tokens=self.shared_tokens)), fit(self.tokens)

    def _needed(self, plan: Plan, dp: int) -> Layout:
        """The smallest layout for a replica's part of the requests."""
        # Rows per slab do not depend on the number of slabs.
        requests = ceil_div(self.requests or 1, dp)
        count = slabs_needed(plan.layout, requests, self.tokens, self.shared_tokens)
        return plan.changed(num_slabs=count + NULL_SLABS).layout

    def clusters(self) -> tuple[Sizing, ...]:
        """Every tp × pp × kv dtype that carries the requests for certain, with as many replicas as
        they need, and without stages the same with experts shared out among the replicas.

        The fewest GPUs come first; of equally many, the most requests, then the fewest stages, the
        earliest kv dtype, the fewest replicas. Empty where no split has room for one request.
        """
        ranked: list[tuple[tuple[int, ...], Sizing]] = []
        requests = self.requests or 1
        for tp, pp, (place, kv_dtype) in product(self.tps, self.pps, enumerate(self.kv_dtypes)):
            with suppress(KvstowError):
                deployment = replace(self.deployment, tp=tp, pp=pp, kv_dtype=kv_dtype)
                question = replace(self, deployment=deployment)
                one = question.sized(question.usable()[0], dp=1)
                enough = [replace(one, dp=ceil_div(requests, one.max_requests or 1))]
                if self.weights.expert_part and pp == 1:
                    usable = question.usable(shares_experts=True)[0]
                    size = partial(question.sized, usable, shares_experts=True)
                    shared = (size(dp=dp) for dp in EXPERT_DP)
                    enough += islice((x for x in shared if x.max_requests >= requests), 1)
                ranked += [
                    ((x.num_gpus, -x.max_requests, pp, place, x.dp), x)
                    for x in enough
                    if x.max_requests
                ]
        by_size = [each for _, each in sorted(ranked, key=lambda pair: pair[0])]
        return tuple(each for each in by_size if self.dp is None or each.dp <= self.dp)


def fewest(clusters: Sequence[Sizing]) -> Sizing | None:
    """Of the clusters with the fewest GPUs the first without pipeline stages, which cost time in
    each step; the first of all where none is; None of none."""
    smallest = [each for each in clusters if each.num_gpus == clusters[0].num_gpus]
    plain = (each for each in smallest if each.deployment.pp == 1)
    return next(plain, smallest[0] if smallest else None)


def _in_memory(plan: Plan, nbytes: int) -> Layout | None:
    """The layout in so many bytes; None where they are too few."""
    try:
        return plan.changed(memory=nbytes, num_slabs=None).layout if nbytes > 0 else None
    except PlanError:
        return None


def _head_copies(plan: Plan) -> int:
    """Ranks that hold the same kv head, of the layer that is repeated most; 1 where there are
    recurrent states only."""
    tp = plan.deployment.tp
    attention = (each for each in plan.held.layers if not isinstance(each.retention, State))
    return max((each.heads.size * tp // each.heads.total for each in attention), default=1)
