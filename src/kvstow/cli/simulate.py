"""`kvstow simulate`: a trace of requests on the block ledger, under one or two policies."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvstow.cli import options
from kvstow.cli.options import check_arena, on_rank
from kvstow.cli.output import (
    MISUSED,
    emit_json,
    emit_text,
    human,
    note,
    refuse,
    table,
    wrapped,
)
from kvstow.errors import TraceError
from kvstow.plan.deployment import Deployment
from kvstow.plan.words import counted

if TYPE_CHECKING:
    from kvstow.plan.layout import Layout
    from kvstow.render.slab_history import SlabHistory
    from kvstow.simulate import Pace, ReplayReport, TraceRequest

Policy = Literal["slab", "union"]

MAX_SECONDS = 1e12

TraceName = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="MIX|FILE",
        help="chat, document, agent, or a file: JSON lines, Mooncake's or Azure's trace.",
    ),
]
PolicyName = Annotated[
    Policy,
    typer.Option("--policy", help="Ours alone, or what engines do today (union) beside it."),
]
NumRequests = Annotated[int, typer.Option("--requests", min=1, help="Requests of a made-up trace.")]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        min=0.001,
        help="Requests per second of a made-up trace.",
        show_default="all at once",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Another seed, another made-up trace.")]
MaxSeconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        min=0.1,
        max=MAX_SECONDS,
        help="Simulated seconds after which to stop.",
        show_default="the end of the trace",
    ),
]
Chunk = Annotated[
    int, typer.Option("--chunk-tokens", min=1, help="Tokens of a prompt computed in one step.")
]
PrefillRate = Annotated[
    float,
    typer.Option(
        "--prefill-rate",
        min=0.001,
        metavar="TOKENS",
        help="Prompt tokens computed per second.",
        show_default="no limit",
    ),
]
DecodeRate = Annotated[
    float,
    typer.Option(
        "--decode-rate",
        min=0.001,
        metavar="TOKENS",
        help="Tokens decoded per second, all requests together.",
        show_default="no limit",
    ),
]
StepSeconds = Annotated[
    float, typer.Option("--step-seconds", min=0.0001, help="The least time that a step takes.")
]


def simulate(
    model: options.ModelName,
    trace: TraceName = "chat",
    policy: PolicyName = "slab",
    requests: NumRequests = 2000,
    rate: Rate = None,
    seed: Seed = 0,
    seconds: MaxSeconds = None,
    chunk_tokens: Chunk = 2048,
    prefill_rate: PrefillRate = float("inf"),
    decode_rate: DecodeRate = float("inf"),
    step_seconds: StepSeconds = 0.025,
    tp: options.Tp = 1,
    pp: options.Pp = 1,
    rank: options.Rank = 0,
    block_tokens: options.BlockTokens = None,
    kv_dtype: options.KvDtype = None,
    memory: options.Memory = None,
    num_slabs: options.NumSlabs = None,
    align: options.Align = None,
    html: options.HtmlFile = None,
    json: options.Json = False,
) -> None:
    """Replay requests: concurrency, waste, hits, latency.

    A step takes the longer of --step-seconds and decoded tokens / --decode-rate, and
    prompt tokens / --prefill-rate on top.
    """
    from kvstow.plan.pack import Site
    from kvstow.render.slab_history import SlabHistory
    from kvstow.simulate import MIXES, Pace
    from kvstow.simulate.replay import layout_of

    check_arena(memory, num_slabs)
    deployment = Deployment(
        model=model,
        tp=tp,
        pp=pp,
        block_tokens=block_tokens,
        kv_dtype=kv_dtype,
        memory=memory,
        num_slabs=num_slabs,
        alignment=options.alignment(align or ()),
    )
    what = on_rank(deployment, rank)
    site = Site(model=what.model.name, alignment=deployment.alignment)
    lines = _trace(trace, requests, rate, seed)
    pace = Pace(
        chunk_tokens=chunk_tokens,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        step_seconds=step_seconds,
    )
    reports: dict[str, ReplayReport] = {}
    histories: dict[str, SlabHistory] = {}
    names: tuple[Policy, ...] = ("slab",) if policy == "slab" else ("slab", policy)
    for name in names:
        layout = layout_of(
            name, what.groups, budget=deployment.budget, num_slabs=num_slabs, site=site
        )
        histories[name] = SlabHistory()
        reports[name] = _replayed(name, layout, lines, pace, seconds, histories[name])
    if html is not None:
        from kvstow.render.data import simulation_page

        mix = {"requests": requests, "rate": rate, "seed": seed} if trace in MIXES else {}
        about = _about(deployment, pace, {"trace": trace, "policy": policy} | mix)
        about |= {"requests": len(lines), "seed": mix.get("seed")}
        page = simulation_page(what.model.name, trace, reports, histories, about=about)
        html.write_text(page, encoding="utf-8")
        note(f"page written to {html}")
    if json:
        emit_json(_document(what.model.name, trace, len(lines), reports))
    else:
        emit_text(
            f"{what.model.name}, {counted(len(lines), 'request')} of {trace}",
            _table(reports),
            _step_words(pace),
        )


def _about(deployment: Deployment, pace: "Pace", settings: dict[str, Any]) -> dict[str, Any]:
    """What the page's header tells: memory, the engine's pace, the command to do this again."""
    from shlex import join

    rates = {"prefill_rate": pace.prefill_rate, "decode_rate": pace.decode_rate}
    settings |= {
        name: getattr(deployment, name)
        for name in ("tp", "pp", "block_tokens", "kv_dtype", "memory", "num_slabs")
    }
    settings |= {"step_seconds": pace.step_seconds, "chunk_tokens": pace.chunk_tokens}
    settings |= {name: rate for name, rate in rates.items() if rate < float("inf")}
    said = [
        part
        for name, value in settings.items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    return {
        "arena_bytes": deployment.budget,
        "step": _step_words(pace),
        "command": join(["kvstow", "simulate", str(deployment.model), *said]),
    }


def _step_words(pace: "Pace") -> str:
    """How long a step takes, as a sentence."""
    text = f"A step takes {pace.step_seconds * 1e3:g} ms"
    if pace.decode_rate < float("inf"):
        text += f", or the time for its decoded tokens at {pace.decode_rate:,g} per second"
    if pace.prefill_rate < float("inf"):
        text += f"; prompt tokens take theirs at {pace.prefill_rate:,g} per second"
    return wrapped(f"{text}. Times follow from that.", indent="")


def _trace(name: str, requests: int, rate: float | None, seed: int) -> "list[TraceRequest]":
    from kvstow.simulate import MIXES, read_trace, synthetic

    if name in MIXES:
        return synthetic(name, num_requests=requests, rate=rate or float("inf"), seed=seed)
    try:
        return read_trace(Path(name))
    except TraceError as error:
        refuse(str(error), code=MISUSED)


def _replayed(
    name: str,
    layout: "Layout",
    trace: "list[TraceRequest]",
    pace: "Pace",
    seconds: float | None,
    history: "SlabHistory",
) -> "ReplayReport":
    """Replay with a bar on stderr, and remember its slabs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvstow.simulate import Replay, ReplayReport

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
    )
    replay = Replay(layout, trace, pace)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=len(trace))

        def watch(done: int, total: int) -> None:
            bar.update(task, completed=done)
            history.see(
                replay.ledger.pool,
                replay.seconds,
                prompt_tokens=replay.record.prompt_tokens,
                hit_tokens=replay.record.hit_tokens,
            )

        record = replay.run(max_seconds=seconds or float("inf"), progress=watch)
    return ReplayReport.of(record)


def _document(
    model: str, trace: str, num_requests: int, reports: "Mapping[str, ReplayReport]"
) -> dict[str, object]:
    return {
        "model": model,
        "trace": trace,
        "requests": num_requests,
        "policies": {name: report.figures() for name, report in reports.items()},
    }


def _table(reports: "Mapping[str, ReplayReport]") -> str:
    def percent(value: float) -> str:
        return f"{100 * value:.2f} %"

    def milliseconds(value: float) -> str:
        return f"{1e3 * value:,.0f} ms"

    rows: dict[str, Callable[[ReplayReport], str]] = {
        "requests at once, mean": lambda r: f"{r.mean_requests:,.1f}",
        "requests at once, peak": lambda r: f"{r.peak_requests:,}",
        "completed": lambda r: f"{r.completed:,}",
        "preemptions": lambda r: f"{r.preemptions:,}",
        "bytes in use, mean": lambda r: human(round(r.mean_bytes_in_use)),
        "  padding": lambda r: percent(r.waste["padding"]),
        "  slab fragmentation": lambda r: percent(r.waste["fragmentation"]),
        "  block rounding": lambda r: percent(r.waste["rounding"]),
        "prompt tokens found cached": lambda r: percent(r.hit_rate),
        "rows per run": lambda r: f"{r.mean_run_rows:.1f}",
        "runs per request": lambda r: f"{r.runs_per_request:.1f}",
        "simulated seconds": lambda r: f"{r.seconds:,.1f}",
        "output tokens per second": lambda r: f"{r.output_tokens_per_second:,.0f}",
        "first token after, median": lambda r: milliseconds(r.first_token_seconds["p50"]),
        "first token after, 95 of 100": lambda r: milliseconds(r.first_token_seconds["p95"]),
        "time per output token, mean": lambda r: milliseconds(r.token_seconds["mean"]),
    }
    return table(("", *reports), [(name, *map(of, reports.values())) for name, of in rows.items()])
