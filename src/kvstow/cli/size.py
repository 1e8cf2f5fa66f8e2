"""`kvstow size`: how many requests fit on GPUs, or what a load needs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import (
    FAILED,
    MISUSED,
    emit_json,
    emit_text,
    human,
    note,
    refuse,
    table,
    wrapped,
)
from kvstow.errors import ModelError, PlanError
from kvstow.plan.deployment import USUAL_TOKENS, Deployment
from kvstow.plan.sizing.cluster import StageSize
from kvstow.plan.words import counted

if TYPE_CHECKING:
    from kvstow.plan.models.weights import Weights
    from kvstow.plan.sizing.cluster import Sizing, StageNeed

SHOWN = 8
"""Clusters that are listed as text; `--json` has all."""

Answered = tuple[dict[str, Any], list[str]]
"""The document, and what is shown below its answer."""


def complete_gpu(start: str) -> list[str]:
    """The names of GPUs that begin so, for the shell."""
    from kvstow.plan.sizing.cluster import GPUS

    return [name for name in GPUS if name.startswith(start.lower())]


Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Length of a request in tokens.")]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        min=1,
        help="Concurrent requests; the answer is what they need.",
        show_default="as many as fit",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME|SIZE",
        autocompletion=complete_gpu,
        help="h100, h200, b200, a100-80, a100-40, l40s, mi300x …, or a GPU's memory.",
        show_default=False,
    ),
]
WeightsBytes = Annotated[
    int | None,
    typer.Option(
        "--weights-bytes",
        parser=options.size,
        metavar="SIZE",
        help="Size of all weights together.",
        show_default="an estimate",
    ),
]
Utilisation = Annotated[
    float,
    typer.Option(
        "--utilisation", min=0.01, max=1.0, help="Fraction of a GPU's memory for weights and cache."
    ),
]
MaybeTp = Annotated[
    int | None,
    typer.Option("--tp", min=1, help="Tensor-parallel ranks.", show_default="1, or searched"),
]
MaybePp = Annotated[
    int | None,
    typer.Option("--pp", min=1, help="Pipeline stages.", show_default="1, or searched"),
]
MaybeDp = Annotated[
    int | None,
    typer.Option("--dp", min=1, help="Replicas.", show_default="1, or as many as needed"),
]
KvDtypes = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="DTYPE[,DTYPE…]",
        help="Element type of the cache; several are searched, with --gpu and --requests.",
        show_default="the model's own",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeQuestion:
    """What is asked: a model, its weights, requests of so many tokens, and GPUs."""

    deployment: Deployment
    weights: "Weights"
    tokens: int
    requests: int | None
    gpu: str | None
    gpu_bytes: int
    utilisation: float
    kv_dtypes: tuple[str | None, ...]

    def document(self, question: str, answer: str, *, fits: bool) -> dict[str, Any]:
        """What all three questions have in common."""
        return {
            "model": self.deployment.facts().name,
            "question": question,
            "answer": answer,
            "fits": fits,
            "tokens": self.tokens,
            "requests": self.requests,
            "gpu": None if self.gpu is None else {"name": self.gpu, "bytes": self.gpu_bytes},
            "utilisation": self.utilisation,
            "weights": {"bytes": self.weights.nbytes, "how": self.weights.how},
        }


def size(
    model: options.ModelName,
    tokens: Tokens = USUAL_TOKENS,
    requests: Requests = None,
    gpu: Gpu = None,
    tp: MaybeTp = None,
    pp: MaybePp = None,
    dp: MaybeDp = None,
    kv_dtype: KvDtypes = None,
    block_tokens: options.BlockTokens = None,
    weights_bytes: WeightsBytes = None,
    utilisation: Utilisation = 0.9,
    json: options.Json = False,
) -> None:
    """How many requests fit on GPUs, or what a load needs.

    Weights and cache are both counted. With --gpu alone, shows how many requests fit. With
    --requests alone, how much memory they need. With both, the smallest cluster, searched
    over tp, pp and replicas. Exits with 1 if not one request fits.
    """
    options.note_shadowed(model)
    kv_dtypes = tuple(kv_dtype.split(",")) if kv_dtype else (None,)
    if kv_dtypes[1:] and (gpu is None or requests is None):
        refuse(
            f"--kv-dtype {kv_dtype}: several are searched only with --gpu and --requests\n\n"
            "hint: add both, or give one dtype",
            code=MISUSED,
        )
    asked = SizeQuestion(
        deployment=Deployment(
            model=model, tp=tp or 1, pp=pp or 1, block_tokens=block_tokens, kv_dtype=kv_dtypes[0]
        ),
        weights=_weights(model, weights_bytes, kv_dtypes),
        tokens=tokens,
        requests=requests,
        gpu=gpu,
        gpu_bytes=_gpu_bytes(gpu),
        utilisation=utilisation,
        kv_dtypes=kv_dtypes,
    )
    _note_context(asked)
    if gpu is None:
        document, parts = _memory(asked, dp or 1)
    elif requests is None:
        document, parts = _fit(asked, dp or 1)
    else:
        document, parts = _cluster(asked, tp, pp, dp)
    if json:
        emit_json(document)
    else:
        emit_text(wrapped(document["answer"], indent=""), *parts, _basis(asked))
    if not document["fits"]:
        raise typer.Exit(FAILED)


def _note_context(asked: SizeQuestion) -> None:
    """Say so where a request is longer than the model is published for."""
    from kvstow.plan.models.catalogue import published

    name = asked.deployment.facts().name
    most = published(name).get("context")
    if most is not None and asked.tokens > most:
        note(f"{name} is published for {most:,} tokens at most; counted with {asked.tokens:,}")


def _gpu_bytes(gpu: str | None) -> int:
    from kvstow.plan.sizing.cluster import gpu_bytes

    try:
        return 0 if gpu is None else gpu_bytes(gpu)
    except PlanError as error:
        refuse(str(error), code=MISUSED)


def _weights(model: str, given: int | None, kv_dtypes: tuple[str | None, ...]) -> "Weights":
    """The weights as given, or an estimate. Ends with 2 on a model or dtype that is none."""
    from kvstow.plan.models.weights import Weights, model_weights

    try:
        for kv_dtype in kv_dtypes:
            Deployment(model=model, kv_dtype=kv_dtype).facts()
        if given is not None:
            return Weights(nbytes=given, how="as given")
        return model_weights(model)
    except ModelError as error:
        refuse(str(error), code=MISUSED)


# ── how many fit ──────────────────────────────────────────────────────────────────────


def _fit(asked: SizeQuestion, dp: int) -> Answered:
    from kvstow.plan.sizing.cluster import sized

    found = sized(
        asked.deployment,
        gpu=asked.gpu_bytes,
        weights=asked.weights.nbytes,
        tokens=asked.tokens,
        dp=dp,
        utilisation=asked.utilisation,
    )
    for line in found.notes:
        note(line)
    document = asked.document("fit", _fit_answer(asked, found), fits=found.max_requests > 0)
    return document | _sizing(found), [
        _stage_table(found.stages, found.deployment.tp),
        *_repeated(found),
    ]


def _fit_answer(asked: SizeQuestion, found: "Sizing") -> str:
    if found.max_requests:
        limit = f"; rank {found.limiting.rank} is the limit" if found.deployment.pp > 1 else ""
        verb = "fits" if found.max_requests == 1 else "fit"
        return f"{_load(asked, found.max_requests)} {verb} at once on {_gpus(asked, found)}{limit}."
    usable = human(int(asked.gpu_bytes * asked.utilisation))
    why = f"{human(found.limiting.weights_bytes)} of weights, and {usable} to use"
    if found.limiting.cache_bytes > 0:
        why = f"{human(found.limiting.cache_bytes)} for the cache"
    others = _clusters(replace(asked, requests=1), None, None, None)
    hint = f" {_gpus(asked, others[0])} would do." if others else ""
    return (
        f"not one request of {asked.tokens:,} tokens fits on {_gpus(asked, found)}: rank "
        f"{found.limiting.rank} has {why}.{hint}"
    )


def _load(asked: SizeQuestion, requests: int) -> str:
    return f"{counted(requests, 'request')} of {asked.tokens:,} tokens"


def _gpus(asked: SizeQuestion, found: "Sizing") -> str:
    """`8 × h100 (tp 4, dp 2, bfloat16 cache)`."""
    split = found.deployment
    sizes = [("tp", split.tp), ("pp", split.pp), ("dp", found.dp)]
    said = [f"{name} {number}" for name, number in sizes if number > 1 or name == "tp"]
    return f"{found.num_gpus:,} × {asked.gpu} ({', '.join((*said, f'{found.kv_dtype} cache'))})"


def _sizing(found: "Sizing") -> dict[str, Any]:
    return _split(found) | {
        "head_copies": found.head_copies,
        "ranks": _ranks(found.stages, found.deployment.tp),
    }


def _split(found: "Sizing") -> dict[str, Any]:
    return {
        "gpus": found.num_gpus,
        "tp": found.deployment.tp,
        "pp": found.deployment.pp,
        "dp": found.dp,
        "kv_dtype": found.kv_dtype,
        "max_requests": found.max_requests,
        "limiting_rank": found.limiting.rank,
    }


def _ranks(stages: "Sequence[StageNeed]", tp: int) -> list[dict[str, int]]:
    """Every rank's part; tensor-parallel ranks of a stage hold equally much."""
    return [asdict(stage) | {"rank": stage.rank + i} for stage in stages for i in range(tp)]


def _stage_table(stages: "Sequence[StageNeed]", tp: int) -> str:
    """One line per stage, and a mark on those that limit how many requests fit."""
    counts = [stage.requests for stage in stages if isinstance(stage, StageSize)]
    rows: list[list[str]] = []
    for stage in stages:
        ranks = str(stage.rank) if tp == 1 else f"{stage.rank}–{stage.rank + tp - 1}"
        sizes = (stage.weights_bytes, stage.cache_bytes, stage.request_bytes)
        rows.append([ranks, f"{stage.layers:,}", *(human(n) if n > 0 else "–" for n in sizes)])
    for row, count in zip(rows, counts, strict=False):
        row.append(f"{count:,}" + (" ←" if len(rows) > 1 and count == min(counts) else ""))
    columns = ["ranks", "layers", "weights", "cache", "one request"]
    return table([*columns, "requests"] if counts else columns, rows)


def _repeated(found: "Sizing") -> list[str]:
    if found.head_copies == 1:
        return []
    return [
        wrapped(
            f"Every kv head is on {found.head_copies} of the {found.deployment.tp} "
            "tensor-parallel ranks: there are fewer heads than ranks. More tp than heads makes "
            "room for the cache only by holding less of the weights.",
            indent="",
        )
    ]


# ── what a load needs ─────────────────────────────────────────────────────────────────


def _memory(asked: SizeQuestion, dp: int) -> Answered:
    from kvstow.plan.sizing.cluster import needed

    requests = asked.requests or 1
    split = asked.deployment
    stages = needed(
        split, weights=asked.weights.nbytes, tokens=asked.tokens, requests=-(-requests // dp)
    )
    most = max(stages, key=lambda stage: stage.weights_bytes + stage.cache_bytes)
    nbytes = most.weights_bytes + most.cache_bytes
    gpus = split.num_ranks * dp
    answer = (
        f"{_load(asked, requests)} at once {'needs' if requests == 1 else 'need'} {human(nbytes)} "
        f"{f'on each of {gpus} GPUs' if gpus > 1 else 'on one GPU'}: {human(most.cache_bytes)} of "
        f"cache and {human(most.weights_bytes)} of weights. With {asked.utilisation:.0%} of a GPU "
        f"in use, it has to have {human(round(nbytes / asked.utilisation))}."
    )
    document = asked.document("memory", answer, fits=True) | {
        "requests": requests,
        "tp": split.tp,
        "pp": split.pp,
        "dp": dp,
        "bytes_per_gpu": nbytes,
        "limiting_rank": most.rank,
        "ranks": _ranks(stages, split.tp),
    }
    return document, [_stage_table(stages, split.tp)]


# ── the smallest cluster ──────────────────────────────────────────────────────────────


def _cluster(asked: SizeQuestion, tp: int | None, pp: int | None, dp: int | None) -> Answered:
    found = _clusters(asked, tp, pp, dp)
    load = _load(asked, asked.requests or 1)
    if not found:
        answer = f"no split that was tried has room on {asked.gpu} for {load}."
        return asked.document("cluster", answer, fits=False) | {"clusters": []}, []
    best = found[0]
    answer = (
        f"{_gpus(asked, best)} {'is' if best.num_gpus == 1 else 'are'} the fewest for {load} at "
        f"once; {best.max_requests:,} would fit."
    )
    document = asked.document("cluster", answer, fits=True) | _sizing(best)
    document |= {"clusters": [_split(each) for each in found]}
    return document, [_cluster_table(found), *_repeated(best)]


def _clusters(
    asked: SizeQuestion, tp: int | None, pp: int | None, dp: int | None
) -> "tuple[Sizing, ...]":
    from kvstow.plan.sizing.cluster import PP, TP, clusters

    found = clusters(
        asked.deployment,
        gpu=asked.gpu_bytes,
        weights=asked.weights.nbytes,
        tokens=asked.tokens,
        requests=asked.requests or 1,
        kv_dtypes=asked.kv_dtypes,
        tps=TP if tp is None else (tp,),
        pps=PP if pp is None else (pp,),
        utilisation=asked.utilisation,
    )
    return tuple(each for each in found if dp is None or each.dp <= dp)


def _cluster_table(found: "tuple[Sizing, ...]") -> str:
    columns: dict[str, Callable[[Sizing], str]] = {
        "kv dtype": lambda each: each.kv_dtype,
        "GPUs": lambda each: f"{each.num_gpus:,}",
        "tp": lambda each: str(each.deployment.tp),
        "pp": lambda each: str(each.deployment.pp),
        "dp": lambda each: str(each.dp),
        "weights": lambda each: human(each.limiting.weights_bytes),
        "cache": lambda each: human(each.limiting.cache_bytes),
        "requests": lambda each: f"{each.max_requests:,}",
    }
    return table(list(columns), [[of(each) for of in columns.values()] for each in found[:SHOWN]])


def _basis(asked: SizeQuestion) -> str:
    """What the answer rests on."""
    text = (
        f"weights: {human(asked.weights.nbytes)}, {asked.weights.how}, in equal parts for layers "
        "and ranks: an estimate."
    )
    if asked.gpu is not None:
        text += (
            f" A GPU has {human(asked.gpu_bytes)}, of which {asked.utilisation:.0%} is for "
            "weights and cache; the rest is left to activations, graphs and the driver."
        )
    return wrapped(text, indent="")
