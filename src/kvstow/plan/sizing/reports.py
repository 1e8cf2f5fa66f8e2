"""The figures that commands and pages show, and what `kvstow size` answers.

plan_figures       a plan: `kvstow plan`
catalogue_figures  one line of `kvstow models`
size_report        what `kvstow size` answers: how many requests fit on GPUs, how much memory a load
                   needs, the fewest GPUs for it, or what a store of all requests takes
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from textwrap import fill
from typing import Any, Literal

from kvstow.plan.group import Group
from kvstow.plan.layout import Layout, PlacedGroup
from kvstow.plan.manifest import fingerprint
from kvstow.plan.models.catalogue import entries
from kvstow.plan.models.serving import own_cache
from kvstow.plan.retention import short_name
from kvstow.plan.sizing.capacity import (
    bytes_per_token,
    fixed_bytes,
    max_requests,
    max_tokens,
    request_bytes,
    stored_bytes,
)
from kvstow.plan.sizing.cluster import NO_GPU, SizeQuestion, Sizing, fewest
from kvstow.plan.sizing.plan import Deployment, Plan
from kvstow.plan.sizing.serve import longest, not_served, serve_command
from kvstow.text import human, plural, table

LENGTHS = (1024, 8192, 32768, 131072)
"""Tokens per request for which sizes and concurrency are given."""


def plan_figures(plan: Plan, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """Every stable key of `kvstow plan --json`, for requests of so many tokens."""
    layout, deployment = plan.layout, plan.deployment
    names = [rows.group.name for rows in layout.groups]
    return {
        "model": layout.model,
        "tp": deployment.tp,
        "pp": deployment.pp,
        "rank": plan.rank,
        "block_tokens": plan.block_tokens,
        "kv_dtype": plan.kv_dtype,
        "order": layout.order,
        "groups": [_group(layout, g, rows) for g, rows in enumerate(layout.groups)],
        "slab_bytes": layout.slab_bytes,
        "num_slabs": layout.num_slabs,
        "arena_bytes": layout.nbytes,
        "padding_bytes_per_slab": dict(zip(names, padding_bytes(layout), strict=True)),
        "regions": 1,
        "transfer": {
            "descriptors_per_block": dict(zip(names, descriptors(layout), strict=True)),
            "bytes_per_block": {name: layout.row_bytes(g) for g, name in enumerate(names)},
        },
        "separate": per_layer_figures(plan.groups),
        "request": _request(layout, lengths),
        "capacity": _capacity(plan, lengths),
        "fingerprint": fingerprint(layout),
    }


def catalogue_figures(name: str) -> dict[str, Any]:
    """One line of `kvstow models --json`: a model that is known by name, in its own dtype."""
    plan = Deployment(model=name).on_rank(0)
    entry, growing = entries()[name], [g for g in plan.groups if g.rows_bound(in_flight=1) is None]
    growth = sum((Fraction(g.page_bytes, g.block_tokens) for g in growing), Fraction(0))
    return {
        "name": name,
        "aliases": entry["aliases"],
        "family": entry["config"]["model_type"],
        "layers": plan.held.total_layers,
        "kv_bytes_per_token": plain(growth),
        "fixed_bytes": sum((g.rows_bound(in_flight=1) or 0) * g.page_bytes for g in plan.groups),
        "kv_dtype": plan.kv_dtype,
        "context": entry["published"].get("context"),
        "parameters": entry["published"].get("parameters"),
        "checked": entry["published"].get("checked", []),
        "source": entry["source"],
    }


def descriptors(layout: Layout) -> tuple[int, ...]:
    """Per group, the contiguous pieces that a block consists of."""
    return tuple(len(footprint.strips) for footprint in layout.footprints)


def slab_shares(layout: Layout) -> tuple[int, ...]:
    """Per group, the bytes that it takes away from others by owning one slab.

    All groups that pass slabs around take the same: the strips of any of them.
    """
    shares = [0] * len(layout.groups)
    for sharing in layout.sharing:
        strips = {
            (strip.offset, strip.stride * layout.groups[g].rows_per_slab)
            for g in sharing
            for strip in layout.footprints[g].strips
        }
        for g in sharing:
            shares[g] = sum(nbytes for _, nbytes in strips)
    return tuple(shares)


def padding_bytes(layout: Layout) -> tuple[int, ...]:
    """Per group, the bytes of a slab that are no page of it while it owns the slab."""
    return tuple(
        share - rows.rows_per_slab * rows.group.page_bytes
        for share, rows in zip(slab_shares(layout), layout.groups, strict=True)
    )


def padding_fractions(layout: Layout) -> tuple[float, ...]:
    """The same, as parts of the slab."""
    return tuple(
        padding / share
        for padding, share in zip(padding_bytes(layout), slab_shares(layout), strict=True)
    )


def per_layer_figures(groups: tuple[Group, ...]) -> dict[str, int]:
    """What one tensor per layer, keys and values apart, costs instead.

    `descriptors_per_block` is that of the group with the most tensors.
    """
    return {
        "regions": sum(group.num_tensors for group in groups),
        "descriptors_per_block": max(group.num_tensors for group in groups),
        "bytes_per_descriptor_max": max(tensor_bytes(group) for group in groups),
    }


def tensor_bytes(group: Group) -> int:
    """The most bytes that one block has in one tensor of a per-layer engine."""
    return max(layer.page_bytes // layer.num_tensors for layer in group.layers)


def _group(layout: Layout, g: int, rows: PlacedGroup) -> dict[str, Any]:
    return {
        "name": rows.group.name,
        "retention": short_name(rows.group.retention),
        "layers": [layer.name for layer in rows.group.layers],
        "block_tokens": rows.group.block_tokens,
        "row_bytes": layout.row_bytes(g),
        "row_stride": layout.row_stride(g),
        "rows_per_slab": rows.rows_per_slab,
        "placements": [
            {
                "layer": layer.name,
                "offset": page[0].offset,
                "nbytes": layer.page_bytes,
                "block_stride": page[0].block_stride,
                "sections": [asdict(place) for place in page],
            }
            for layer, page in zip(rows.group.layers, rows.placements, strict=True)
        ],
    }


def _request(layout: Layout, lengths: Sequence[int]) -> dict[str, Any]:
    return {
        "fixed_bytes": fixed_bytes(layout),
        "bytes_per_token": plain(bytes_per_token(layout)),
        "at_tokens": {str(n): request_bytes(layout, n) for n in lengths},
    }


def _capacity(plan: Plan, lengths: Sequence[int]) -> dict[str, Any]:
    """What fits on all ranks at once, and on this one by itself."""
    longest = [max_tokens(each) for each in plan.stages]
    return {
        "tokens": min((n for n in longest if n is not None), default=None),
        "requests": {str(n): plan.max_requests(tokens=n) for n in lengths},
        "limiting_rank": plan.limiting_rank,
        "this_rank": {
            "tokens": max_tokens(plan.layout),
            "requests": {str(n): max_requests(plan.layout, n) for n in lengths},
        },
    }


def plain(number: Fraction) -> int | float:
    """A whole number as one, for JSON."""
    return int(number) if number.denominator == 1 else float(number)


# ── kvstow size ───────────────────────────────────────────────────────────────────────

NODE_GPUS = 8
"""GPUs that a node usually has at most."""

SHOWN = 8
"""Clusters that are listed as text; JSON has all."""

STAGES_WAIT = " Its pipeline stages wait for one another, so each token takes longer."

EXPERTS_SHARED = (
    "e: experts shared among the replicas, attention on each. Not counted: buffers of\n"
    "their exchange, and experts that are read more often than others."
)


@dataclass(frozen=True, kw_only=True)
class SizeReport:
    """An answer in a sentence, its figures by their keys in JSON, and further text."""

    question: SizeQuestion
    kind: Literal["fit", "memory", "cluster", "store"]
    answer: str
    fits: bool = True
    figures: dict[str, Any]
    parts: tuple[str, ...] = ()
    split: Sizing | None = None
    """What the command serves; None where there is none."""

    @cached_property
    def command(self) -> str | None:
        """The vLLM command that serves it so; None where none does."""
        if self.split is None or self.question.engine.name == "none" or self._not_served:
            return None
        return serve_command(self.question, self.split)

    @property
    def _not_served(self) -> str:
        return "" if self.split is None else not_served(self.question)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed of the model, and what the answer leaves out."""
        return self._assumptions + self._caveats

    @property
    def _assumptions(self) -> tuple[str, ...]:
        return self.question.deployment.on_rank(0).notes

    @property
    def _caveats(self) -> tuple[str, ...]:
        question, name = self.question, self.question.config.name
        notes: tuple[str, ...] = ()
        limit = longest(question)
        if limit is not None and question.tokens > limit:
            kept = "" if self.command is None else "; the command keeps to that limit"
            notes += (
                f"{name} is published for {limit:,} tokens at most; counted with "
                f"{question.tokens:,}{kept}",
            )
        if self._not_served:
            notes += (f"no vllm serve line: {self._not_served}",)
        if self.command is not None and self.split is not None and self.split.num_gpus > NODE_GPUS:
            notes += (
                f"{self.split.num_gpus:,} GPUs are several nodes of {NODE_GPUS}: run the command "
                "on each with vLLM's options for them, such as --nnodes and --node-rank",
            )
        if self.kind == "fit" and "kv_lora_rank" in question.config:
            notes += (
                "latents are whole on every tensor-parallel rank; data-parallel attention with "
                "expert parallelism, the usual way to serve such a model, is searched with "
                "--requests",
            )
        return notes

    def as_json(self) -> dict[str, Any]:
        question, gpu = self.question, self.question.gpu
        document = {
            "question": self.kind,
            "answer": self.answer,
            "fits": self.fits,
            "model": question.config.name,
            "tokens": question.tokens,
            "output_tokens": question.output_tokens,
            "shared_tokens": question.shared_tokens,
            "requests": question.requests,
            "gpu": None if gpu is NO_GPU else {"name": gpu.name, "bytes": gpu.nbytes},
            "engine": question.engine.name,
            "utilization": question.engine.utilization,
            "weights": {
                "bytes": question.weights.nbytes,
                "loaded_bytes": question.loaded_bytes,
                "how": question.weights.how,
                "left_out": list(question.weights.left_out),
            },
            "notes": list(self.notes),
        }
        return document | self.figures | ({} if self.command is None else {"command": self.command})

    def __str__(self) -> str:
        assumptions, caveats = (
            [_wrapped(f"note: {each}") for each in notes]
            for notes in (self._assumptions, self._caveats)
        )
        answer = "\n".join((_wrapped(self.answer), *assumptions))
        weights = [] if self.kind == "store" else [_weights(self.question)]
        basis = "\n".join((*weights, *caveats))
        return "\n\n".join(filter(None, (answer, *self.parts, basis, self.command)))


def size_report(question: SizeQuestion) -> SizeReport:
    """The answer: what fits on a GPU, what requests need, the fewest GPUs for them, or a store."""
    if question.requests_per_hour is not None:
        return _store(question, question.requests_per_hour)
    if question.gpu is NO_GPU:
        return _memory(question)
    return _fit(question) if question.requests is None else _cluster(question)


def _fit(question: SizeQuestion) -> SizeReport:
    """How many requests fit on GPUs: for certain, and at most."""
    least, most = question.usable()
    low, high = question.sized(least), question.sized(most, tokens=question.mean_tokens)
    concurrency = round(low.concurrency, 2), round(high.concurrency, 2)
    kv_tokens = tuple(int(each.concurrency * question.tokens) for each in (low, high))
    own = low.own_requests, high.own_requests
    caches = low.limiting.cache_bytes, high.limiting.cache_bytes
    parts = [_stages(low), _terms(question, low, high), *_repeated(low)]
    if high.max_requests:
        each = f", on each of {low.dp} replicas" if low.dp > 1 else ""
        counts = (
            f"GPU KV cache size: {_span(*(f'{n:,}' for n in kv_tokens))} tokens{each}\n"
            f"Maximum concurrency for {question.tokens:,} tokens per request: "
            f"{_span(*(f'{n:.2f}x' for n in concurrency))}"
        )
        if not question.has_vllm_blocks:
            counts = f"counted in kvstow's own packing, not in vLLM's blocks:\n{counts}"
        elif own != (low.max_requests, high.max_requests):
            packing = _span(*(f"{n:,}" for n in own))
            counts += f"\nin kvstow's own packing: {packing} requests"
        parts.insert(0, counts)
    return SizeReport(
        question=question,
        kind="fit",
        answer=_fitting(question, low, high) + _reservations(question),
        fits=high.max_requests > 0,
        figures={
            **_figures(low),
            "max_requests_at_most": high.max_requests,
            "own_requests": list(own),
            "concurrency": list(concurrency),
            "kv_tokens": list(kv_tokens),
            "cache_bytes": list(caches),
            "overhead": {k: list(v) for k, v in question.overhead().items()},
        },
        parts=tuple(parts),
        split=low if high.max_requests else None,
    )


def _fitting(question: SizeQuestion, low: Sizing, high: Sizing) -> str:
    """That so many requests fit, or why not one does."""
    gpus, limiting = _gpus(question, low), low.limiting
    if low.max_requests:
        limit = f"; rank {limiting.rank} is the limit" if low.deployment.pp > 1 else ""
        if limiting.requests == question.most_running:
            limit = f"; --max-num-seqs {limiting.requests} is the limit"
        most = "" if high.max_requests == low.max_requests else f", at most {high.max_requests:,},"
        verb = "fits" if low.max_requests == 1 and not most else "fit"
        return f"{_requests(question, low.max_requests)}{most} {verb} at once on {gpus}{limit}."
    cache, most = limiting.cache_bytes, high.limiting.cache_bytes
    left = human(cache) if cache > 0 else f"at most {human(most)}" if most > 0 else "nothing"
    other = fewest(replace(question, requests=1, dp=None).clusters())
    number = high.max_requests
    start = f"not one request of {question.tokens:,} tokens fits on {gpus}"
    if number:
        start = f"{'at most ' * (number > 1)}{_requests(question, number)} may fit on {gpus}"
    sure = " for certain" if number else ""
    hint = "" if other is None else f" {_gpus(question, other)} would do{sure}."
    if other is not None and other.deployment.pp > low.deployment.pp:
        hint += STAGES_WAIT
    return (
        f"{start}: on rank {limiting.rank} {human(limiting.weights_bytes)} of weights leave {left} "
        f"for the cache.{hint}"
    )


def _terms(question: SizeQuestion, low: Sizing, high: Sizing) -> str:
    """Where the memory of one GPU goes, on the fullest rank."""
    engine, caches = question.engine, (low.limiting.cache_bytes, high.limiting.cache_bytes)
    seen = "what vLLM sees" if engine.name == "vllm" else "it"
    rows = [
        ("one GPU", human(question.gpu.nbytes), ""),
        (f"{engine.utilization:.0%} of {seen}", human(engine.share(question.gpu)), ""),
        ("weights", human(low.limiting.weights_bytes), ""),
        *((name, human(each[0]), human(each[1])) for name, each in question.overhead().items()),
        ("cache", *(human(n) if n >= 0 else f"-{human(-n)}" for n in caches)),
    ]
    return table(("where it goes", "at least", "at most"), rows)


def _memory(question: SizeQuestion) -> SizeReport:
    """How much memory a load needs on every rank."""
    need = question.sized(None)
    requests, most = question.requests or 1, need.fullest
    nbytes = most.weights_bytes + most.cache_bytes
    gpus = f"on each of {need.num_gpus} GPUs" if need.num_gpus > 1 else "on one GPU"
    answer = (
        f"{_requests(question, requests)} at once {'needs' if requests == 1 else 'need'} "
        f"{human(nbytes)} {gpus}: {human(most.cache_bytes)} of cache and "
        f"{human(most.weights_bytes)} of weights, beside what the engine takes; --gpu NAME counts "
        "that too."
    )
    return SizeReport(
        question=question,
        kind="memory",
        answer=answer + _reservations(question),
        figures={
            **_figures(need),
            "requests": requests,
            "bytes_per_gpu": nbytes,
            "limiting_rank": most.rank,
        },
        parts=(_stages(need),),
    )


def _cluster(question: SizeQuestion) -> SizeReport:
    """The splits that carry a load, fewest GPUs first."""
    splits, load = question.clusters(), _requests(question, question.requests or 1)
    figures: dict[str, Any] = {"clusters": [_split(each) for each in splits]}
    best = fewest(splits)
    if best is None:
        return SizeReport(
            question=question,
            kind="cluster",
            answer=f"no split that was tried has room on {question.gpu.name} for {load}.",
            fits=False,
            figures=figures,
        )
    answer = (
        f"{_gpus(question, best)} {'is' if best.num_gpus == 1 else 'are'} the fewest for {load} "
        f"at once; {best.max_requests:,} would fit."
    )
    if best.deployment.pp > 1:
        answer += STAGES_WAIT
        plain = next((each for each in splits if each.deployment.pp == 1), None)
        if plain is not None:
            answer += f" Without them {_gpus(question, plain)} would do."
    if splits[0].max_requests > best.max_requests:
        answer += (
            f" With pipeline stages {_gpus(question, splits[0])} would fit "
            f"{splits[0].max_requests:,}."
        )
    columns = ("kv dtype", "GPUs", "tp", "pp", "dp", "weights", "cache", "requests")
    rows = [
        (
            each.kv_dtype,
            f"{each.num_gpus:,}",
            str(each.deployment.tp),
            str(each.deployment.pp),
            f"{each.dp}{' e' if each.shares_experts else ''}",
            human(each.limiting.weights_bytes),
            human(each.limiting.cache_bytes),
            f"{each.max_requests:,} {' ←'[each == best]}",
        )
        for each in splits[:SHOWN]
    ]
    shared = any(each.shares_experts for each in splits[:SHOWN])
    legend = [EXPERTS_SHARED] if shared else []
    return SizeReport(
        question=question,
        kind="cluster",
        answer=answer + _reservations(question),
        figures={
            **figures,
            **_figures(best),
        },
        parts=("\n\n".join((table(columns, rows), *legend)), *_repeated(best)),
        split=best,
    )


def _store(question: SizeQuestion, per_hour: int) -> SizeReport:
    """What the rows of all requests of some hours take on host or disk, every rank with its own."""
    hours, tp = question.store_hours, question.deployment.tp
    requests = hours * per_hour
    stages = replace(question.deployment, memory=None, num_slabs=2).stages()
    parts = [stored_bytes(each.layout, question.tokens, question.shared_tokens) for each in stages]
    each, shared = (tp * sum(column) for column in zip(*parts, strict=True))
    nbytes, rate = requests * each + shared, each * per_hour // 3600
    rank = max(requests * part + common for part, common in parts)
    answer = (
        f"{_requests(question, requests)} ({hours:,} hours of {per_hour:,} an hour) take "
        f"{human(nbytes)} on host or disk: {human(each)} each, {human(rate)} written per second."
    )
    if len(parts) * tp > 1:
        answer += f" At most {human(rank)} of it are a rank's."
    return SizeReport(
        question=question,
        kind="store",
        answer=answer,
        figures={
            "requests_per_hour": per_hour,
            "hours": hours,
            "store_bytes": nbytes,
            "store_bytes_per_rank": rank,
            "bytes_per_request": each,
            "shared_bytes": shared,
            "write_bytes_per_second": rate,
        },
    )


# ── words ─────────────────────────────────────────────────────────────────────────────


def _requests(question: SizeQuestion, requests: int) -> str:
    """`200 requests of 8,192 tokens`."""
    shared = f" that share the first {question.shared_tokens:,}" if question.shared_tokens else ""
    return f"{plural(requests, 'request')} of {question.tokens:,} tokens{shared}"


def _gpus(question: SizeQuestion, sizing: Sizing) -> str:
    """`8 × h100 (tp 4, dp 2, bfloat16 cache)`."""
    split = sizing.deployment
    sizes = [("tp", split.tp), ("pp", split.pp), ("dp", sizing.dp)]
    parts = [f"{name} {number}" for name, number in sizes if number > 1 or name == "tp"]
    parts += ["experts shared"] if sizing.shares_experts else []
    is_auto = (split.kv_dtype or "auto").lower() == "auto"
    named = own_cache(question.config) if is_auto else None
    cache = f"{sizing.kv_dtype} cache"
    if named is not None and named.dtype is not None:
        cache += f" as the checkpoint's {named.key} says"
    return f"{sizing.num_gpus:,} × {question.gpu.name} ({', '.join((*parts, cache))})"


def _reservations(question: SizeQuestion) -> str:
    """What the answer leaves out."""
    if not question.weights.left_out:
        return ""
    return f" The weights do not include {' and '.join(question.weights.left_out)}."


def _weights(question: SizeQuestion) -> str:
    weights, loaded = question.weights, question.loaded_bytes
    padded = f" Padded for the kernels, they take {human(loaded)}."
    return _wrapped(
        f"weights: {human(weights.nbytes)} ({weights.how}), split evenly over layers and ranks: "
        f"an estimate.{padded if loaded > weights.nbytes else ''}"
    )


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _split(sizing: Sizing) -> dict[str, Any]:
    return {
        "gpus": sizing.num_gpus,
        "tp": sizing.deployment.tp,
        "pp": sizing.deployment.pp,
        "dp": sizing.dp,
        "shares_experts": sizing.shares_experts,
        "kv_dtype": sizing.kv_dtype,
        "max_requests": sizing.max_requests,
        "limiting_rank": sizing.limiting.rank,
    }


def _figures(sizing: Sizing) -> dict[str, Any]:
    """The split, and every rank's part; tensor-parallel ranks of a stage hold equally much."""
    ranks = range(sizing.deployment.tp)
    parts = [asdict(each) | {"rank": each.rank + i} for each in sizing.stages for i in ranks]
    return _split(sizing) | {"head_copies": sizing.head_copies, "ranks": parts}


def _stages(sizing: Sizing) -> str:
    """One line per stage, and a mark on those that limit how many requests fit."""
    tp, stages = sizing.deployment.tp, sizing.stages
    least = sizing.limiting.requests if len(stages) > 1 else -1
    rows = [
        (
            str(stage.rank) if tp == 1 else f"{stage.rank}–{stage.rank + tp - 1}",
            f"{stage.layers:,}",
            *(
                human(n) if n > 0 else "–"
                for n in (stage.weights_bytes, stage.cache_bytes, stage.request_bytes)
            ),
            f"{stage.requests:,}" + (" ←" if stage.requests == least else ""),
        )
        for stage in stages
    ]
    return table(("ranks", "layers", "weights", "cache", "one request", "requests"), rows)


def _repeated(sizing: Sizing) -> list[str]:
    if sizing.head_copies == 1:
        return []
    return [
        _wrapped(
            f"Every kv head is on {sizing.head_copies} of the {sizing.deployment.tp} "
            "tensor-parallel ranks: there are fewer heads than ranks. More tp than heads makes "
            "room for the cache only by holding less of the weights."
        )
    ]


def _wrapped(text: str) -> str:
    return fill(text, 80)
