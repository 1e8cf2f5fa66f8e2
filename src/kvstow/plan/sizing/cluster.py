"""How many requests fit on GPUs, and which GPUs a load needs: weights and cache together.

    usable    = what the engine leaves of a GPU to weights and cache
    weights   = bytes of all weights × layers of the stage / all layers / tp: an estimate
    cache     = usable - weights, on each rank; the plan of that memory tells what fits
    requests  = those that fit on the fullest rank, times dp

A request lives on all ranks of a replica at once, so the fullest rank limits. Tensor-parallel
ranks of one stage hold equally much, so one of them is planned. Data-parallel attention and
expert parallelism are not searched: `dp` are whole replicas.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction

from kvstow.errors import KvstowError, PlanError
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.retention import State
from kvstow.plan.sizing.capacity import concurrency, max_requests, request_bytes, slabs_needed
from kvstow.plan.sizing.plan import Deployment, RankLayers
from kvstow.plan.view import ceil_div
from kvstow.plan.words import parse_size

GPUS: dict[str, int] = {
    name: mebibytes << 20
    for name, mebibytes in (
        ("a10", 23028),
        ("a100-40", 40960),
        ("a100-80", 81920),
        ("a30", 24576),
        ("a6000", 49140),
        ("b200", 183359),
        ("b300", 275040),
        ("gb200", 189471),
        ("gb300", 284208),
        ("gh200", 97871),
        ("h100", 81559),
        ("h20", 97871),
        ("h200", 143771),
        ("l4", 23034),
        ("l40s", 46068),
        ("mi300x", 196592),
        ("mi325x", 262128),
        ("mi355x", 294896),
        ("rtx-3090", 24576),
        ("rtx-4090", 24564),
        ("rtx-5090", 32607),
        ("rtx-pro-6000", 97887),
        ("t4", 15360),
    )
}
"""Bytes of memory, about as the driver's own tool reports them.

Compared with reports of nvidia-smi: a10, a100-40, a100-80, h100, l4, l40s, t4 (modal-labs/
modal-client#2797), rtx-4090 (vllm-project/vllm#7553). b200 is within 1 % of what CUDA reports
(pytorch/ao#4002). The others are not checked.
"""

LEAST_BYTES = 1 << 30
"""No GPU has less memory: a size below it lacks its unit."""

TP = (1, 2, 4, 8)
PP = (1, 2, 4, 8)
"""What is tried when the smallest cluster is searched."""


SPELLINGS = {"a100": "a100-80", "h100-80": "h100", "a100-sxm4-80": "a100-80", "rtx-a6000": "a6000"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as somebody called it, and its memory."""

    name: str
    nbytes: int

    @staticmethod
    def parse(text: str) -> "Gpu":
        """`h100`, `A100 80GB`, `RTX 3090` …, or one that has that memory, such as `80GiB`."""
        name = re.sub(r"[ _]+", "-", text.strip().lower()).removeprefix("nvidia-")
        name = re.sub(r"^(geforce-)?rtx-?(?=\d)", "rtx-", name)
        for each in (name, name.removesuffix("gb"), SPELLINGS.get(name.removesuffix("gb"), "")):
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
            raise PlanError(
                f"a GPU of {text!r} has {nbytes:,} bytes, fewer than {LEAST_BYTES:,}\n\n"
                "hint: give the unit too, such as 80GiB"
            )
        return Gpu(text.strip(), nbytes)


# ── how many requests fit ─────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeed:
    """The ranks `[rank, rank + tp)` of one pipeline stage: what each of them holds."""

    rank: int
    layers: int
    weights_bytes: int
    cache_bytes: int
    """For a load, what its rows need. On a GPU, what is left; below 0 where the weights alone
    do not fit."""
    request_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSize(StageNeed):
    """The same on GPUs, and how many requests fit."""

    requests: int
    concurrency: float
    """The same with decimals, were memory divisible; 0 where nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A deployment on `dp` × `pp` × `tp` GPUs, and what fits."""

    deployment: Deployment
    kv_dtype: str
    dp: int
    stages: tuple[StageSize, ...]
    head_copies: int
    """Ranks that hold the same kv head: above 1, more `tp` adds no room for the cache."""
    notes: tuple[str, ...]

    @property
    def num_gpus(self) -> int:
        return self.deployment.num_ranks * self.dp

    @property
    def limiting(self) -> StageSize:
        """The stage on which the fewest requests fit; the first of several."""
        return min(self.stages, key=lambda stage: stage.requests)

    @property
    def concurrency(self) -> float:
        """Requests with decimals on all replicas, as vLLM's log says it."""
        return self.dp * min(stage.concurrency for stage in self.stages)

    @property
    def max_requests(self) -> int:
        """Requests that fit at once on all replicas together."""
        return self.dp * self.limiting.requests


def sized(
    deployment: Deployment,
    *,
    usable: int,
    weights: int,
    tokens: int,
    dp: int = 1,
) -> Sizing:
    """How many requests of `tokens` fit into `usable` bytes per GPU beside all the weights.

    A rank whose weights do not fit, or leave no room for two slabs, holds 0 requests.
    Raises ModelError for a model that cannot be split so.
    """
    deployment = replace(deployment, memory=None, num_slabs=2)
    held = deployment.stages()
    stages = tuple(_stage(each, usable, weights, tokens) for each in held)
    return Sizing(
        deployment=deployment,
        kv_dtype=held[0].kv_dtype,
        dp=dp,
        stages=stages,
        head_copies=_head_copies(held[0]),
        notes=held[0].model.notes,
    )


def _stage(held: RankLayers, usable: int, weights: int, tokens: int) -> StageSize:
    share = stage_weights(held, weights)
    layout = _in_memory(held, usable - share)
    return StageSize(
        rank=held.rank,
        layers=held.model.stage_layers,
        weights_bytes=share,
        cache_bytes=usable - share,
        request_bytes=request_bytes(layout or held.layout(), tokens),
        requests=0 if layout is None else max_requests(layout, tokens),
        concurrency=0.0 if layout is None else concurrency(layout, tokens),
    )


def stage_weights(held: RankLayers, weights: int) -> int:
    """The bytes of weights on one rank, if layers and ranks have equal parts of them."""
    model = held.model
    share = Fraction(model.stage_layers, model.total_layers * held.deployment.tp)
    return ceil_div(weights * share.numerator, share.denominator)


def _in_memory(held: RankLayers, nbytes: int) -> Layout | None:
    """The layout in so many bytes; None where they are too few."""
    if nbytes <= 0:
        return None
    try:
        return held.changed(memory=nbytes, num_slabs=None).layout()
    except PlanError:
        return None


def _head_copies(held: RankLayers) -> int:
    """Ranks that hold the same kv head, of the layer that is repeated most; 1 where there are
    recurrent states only."""
    tp = held.deployment.tp
    attention = (each for each in held.model.layers if not isinstance(each.retention, State))
    return max((each.heads.size * tp // each.heads.total for each in attention), default=1)


# ── what a load needs ─────────────────────────────────────────────────────────────────


def needed(
    deployment: Deployment, *, weights: int, tokens: int, requests: int
) -> tuple[StageNeed, ...]:
    """What every stage needs for so many requests of so many tokens at once."""
    deployment = replace(deployment, memory=None, num_slabs=2)
    found: list[StageNeed] = []
    for held in deployment.stages():
        layout = _least(held, tokens, requests)
        found.append(
            StageNeed(
                rank=held.rank,
                layers=held.model.stage_layers,
                weights_bytes=stage_weights(held, weights),
                cache_bytes=layout.nbytes,
                request_bytes=request_bytes(layout, tokens),
            )
        )
    return tuple(found)


def _least(held: RankLayers, tokens: int, requests: int) -> Layout:
    """The layout with as many slabs as the requests need: rows per slab do not depend on it."""
    count = slabs_needed(held.layout(), requests, tokens) + NULL_SLABS
    return held.changed(num_slabs=count).layout()


# ── the smallest cluster ──────────────────────────────────────────────────────────────


def clusters(
    deployment: Deployment,
    *,
    usable: Callable[[int], int],
    weights: int,
    tokens: int,
    requests: int,
    kv_dtypes: Sequence[str | None],
    tps: Iterable[int] = TP,
    pps: Iterable[int] = PP,
) -> tuple[Sizing, ...]:
    """Every tp × pp × kv dtype that can be, with as many replicas as the load needs.

    `usable` are the bytes of a GPU for weights and cache, by `tp`.
    The fewest GPUs come first; of equally many, the fewest stages, then the earliest kv
    dtype, then the fewest replicas. Empty where no split has room for one request.
    """
    found: list[tuple[tuple[int, ...], Sizing]] = []
    pps = tuple(pps)
    for tp in tps:
        for pp in pps:
            for place, kv_dtype in enumerate(kv_dtypes):
                split = replace(deployment, tp=tp, pp=pp, kv_dtype=kv_dtype)
                try:
                    one = sized(split, usable=usable(tp), weights=weights, tokens=tokens)
                except KvstowError:
                    continue
                if one.max_requests:
                    each = replace(one, dp=ceil_div(requests, one.max_requests))
                    found.append(((each.num_gpus, pp, place, each.dp), each))
    return tuple(each for _, each in sorted(found, key=lambda pair: pair[0]))
