"""`kvstow size`: how many requests fit on GPUs, or what a load needs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvstow.cli import options
from kvstow.cli.output import refuse, reporting, usage
from kvstow.errors import PlanError
from kvstow.plan.sizing.cluster import Engine, EngineName, Gpu, SizeQuestion
from kvstow.plan.sizing.plan import USUAL_TOKENS, Deployment

if TYPE_CHECKING:
    from kvstow.plan.sizing.reports import SizeReport


def complete_gpu(start: str) -> list[str]:
    """The names of GPUs that begin so, for the shell."""
    from kvstow.plan.sizing.cluster import GPUS

    return [name for name in GPUS if name.startswith(start.lower())]


Tokens = Annotated[int, typer.Option(min=1, help="Length of a request in tokens.")]
OutputTokens = Annotated[
    int,
    typer.Option(
        min=0, help="How many of --tokens are generated; requests hold half of them on average."
    ),
]
SharedTokens = Annotated[
    int,
    typer.Option(
        min=0, help="How many of --tokens all requests begin with, such as a system prompt."
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Concurrent requests; the answer is what they need.",
        show_default="as many as fit",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|SIZE[,…]",
        autocompletion=complete_gpu,
        help="h100, h200, b200, a100, l40s, rtx-4090, mi300x …, 8xh100, or a GPU's memory; "
        "several are answered one by one.",
    ),
]
WeightsBytes = Annotated[
    int | None,
    options.size_option(help="Size of all weights together.", show_default="an estimate"),
]
WeightsDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Element type of the layers' weights: bfloat16, fp8, int4, nvfp4 …",
        show_default="the checkpoint's",
    ),
]
Engines = Annotated[
    EngineName,
    typer.Option(help="vllm: subtract what vLLM takes, too; none: weights and cache alone."),
]
Utilization = Annotated[
    float, typer.Option(min=0.01, max=1.0, help="Fraction of a GPU's memory that may be used.")
]
MaxBatchedTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens that the engine computes in one step.", show_default="vLLM's"),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(min=1, help="Requests that may run at once.", show_default="vLLM's")
]
AsyncScheduling = Annotated[
    bool,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Whether vLLM plans a step while another one runs, and so reserves more for windows.",
    ),
]
Reserve = Annotated[
    int | None,
    options.size_option(
        help="What the engine takes besides weights and cache, if you know it from its log.",
        show_default="a range",
    ),
]
RequestsPerHour = Annotated[
    int | None,
    typer.Option(min=1, help="New requests per hour; the answer is the store that they need."),
]
StoreHours = Annotated[int, typer.Option(min=1, help="How many hours the store keeps them.")]
MaybeTp = Annotated[
    int | None, typer.Option(min=1, help="Tensor-parallel ranks.", show_default="1, or searched")
]
MaybePp = Annotated[
    int | None, typer.Option(min=1, help="Pipeline stages.", show_default="1, or searched")
]
MaybeDp = Annotated[
    int | None, typer.Option(min=1, help="Replicas.", show_default="1, or as many as needed")
]
KvDtypes = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE[,DTYPE…]",
        help="Element type of the cache; several are searched, with --gpu and --requests.",
        show_default="the model's own",
    ),
]


@dataclass(frozen=True, slots=True)
class SizeReports:
    """The answer for each GPU that was named, or the one without."""

    answers: "Sequence[SizeReport]"

    @property
    def failure(self) -> str | None:
        return None if any(each.fits for each in self.answers) else "not one request fits"

    def as_json(self) -> object:
        documents = [each.as_json() for each in self.answers]
        return documents if len(documents) > 1 else documents[0]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.answers))


@reporting
def size(
    model: options.ModelName,
    tokens: Tokens = USUAL_TOKENS,
    output_tokens: OutputTokens = 0,
    shared_tokens: SharedTokens = 0,
    requests: Requests = None,
    gpu: Gpus = None,
    tp: MaybeTp = None,
    pp: MaybePp = None,
    dp: MaybeDp = None,
    kv_dtype: KvDtypes = None,
    block_tokens: options.BlockTokens = None,
    weights_bytes: WeightsBytes = None,
    weights_dtype: WeightsDtype = None,
    engine: Engines = "vllm",
    utilization: Utilization = 0.92,
    max_batched_tokens: MaxBatchedTokens = None,
    max_num_seqs: MaxNumSeqs = None,
    async_scheduling: AsyncScheduling = True,
    reserve: Reserve = None,
    requests_per_hour: RequestsPerHour = None,
    store_hours: StoreHours = 24,
) -> SizeReports:
    """Find how many requests fit on GPUs, or what a load needs.

    Counts weights, cache and what the engine takes. With --gpu alone: how many requests fit. With
    --requests alone: how much memory they need. With both: the smallest cluster, over tp, pp and
    replicas. With --requests-per-hour: how much a store on host or disk takes. Exits with 1 if not
    one request can fit.
    """
    from kvstow.plan.sizing.cluster import PP, TP
    from kvstow.plan.sizing.reports import size_report
    from kvstow.plan.sizing.weights import model_weights

    options.note_shadowed(model)
    kv_dtypes = tuple(kv_dtype.split(",")) if kv_dtype else (None,)
    if kv_dtypes[1:] and (gpu is None or requests is None):
        refuse(
            f"--kv-dtype {kv_dtype}: several are searched only with --gpu and --requests\n\n"
            "hint: add both, or give one dtype"
        )
    for each in kv_dtypes:
        Deployment(model=model, kv_dtype=each).facts()
    if requests_per_hour is not None and (gpu or requests):
        refuse(
            "--requests-per-hour asks for a store on host or disk\n\n"
            "hint: leave --gpu and --requests out"
        )
    with usage(PlanError):
        question = SizeQuestion(
            deployment=Deployment(
                model=model,
                tp=tp or 1,
                pp=pp or 1,
                block_tokens=block_tokens,
                kv_dtype=kv_dtypes[0],
            ),
            weights=model_weights(model, weights_dtype, 0 if requests_per_hour else weights_bytes),
            tokens=tokens,
            shared_tokens=shared_tokens,
            output_tokens=output_tokens,
            requests=requests,
            engine=Engine(
                name=engine,
                utilization=utilization,
                max_batched_tokens=max_batched_tokens,
                max_num_seqs=max_num_seqs,
                async_scheduling=async_scheduling,
                reserve=reserve,
            ),
            kv_dtypes=kv_dtypes,
            dp=dp,
            tps=TP if tp is None else (tp,),
            pps=PP if pp is None else (pp,),
            requests_per_hour=requests_per_hour,
            store_hours=store_hours,
        )
        questions = [question]
        if gpu is not None:
            questions = [_on_gpus(question, each, tp) for each in gpu.split(",")]
    return SizeReports([size_report(each) for each in questions])


def _on_gpus(question: SizeQuestion, text: str, tp: int | None) -> SizeQuestion:
    """The question for a GPU, or for `8xh100`: so many, in tensor parallel if nothing else is said.

    Raises PlanError where that is not as many as the split has.
    """
    match = re.match(r"\s*(\d{1,6}) ?[x×*] ?", text)
    name = text[match.end() :] if match else text
    question = replace(question, gpu=Gpu.parse(name))
    if match is None:
        return question
    if question.requests is not None:
        raise PlanError(
            f"{text}: with --requests the number of GPUs is the answer\n\nhint: --gpu {name}"
        )
    number, others = int(match[1]), question.deployment.pp * (question.dp or 1)
    split = replace(question.deployment, tp=tp or max(number // others, 1))
    if split.tp * others != number:
        raise PlanError(
            f"{text}: tp {split.tp} × pp {split.pp} × dp {question.dp or 1} is "
            f"{split.tp * others}, not {number}"
        )
    return replace(question, deployment=split)
