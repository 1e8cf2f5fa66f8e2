"""`kvstow simulate`: a trace of requests on the block ledger, under one or two policies."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvstow.cli import options
from kvstow.cli.options import check_arena, on_rank
from kvstow.cli.output import emit_json, emit_text, human, note, table
from kvstow.plan.deployment import Deployment

if TYPE_CHECKING:
    from kvstow.plan.layout import Layout
    from kvstow.render.slab_history import SlabHistory
    from kvstow.simulate import Pace, ReplayReport, TraceRequest

Policy = Literal["slab", "union"]

MAX_SECONDS = 1e12

TraceName = Annotated[
    str,
    typer.Option(
        "--trace", metavar="MIX|FILE", help="chat, document, agent, or a file of JSON lines."
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


def simulate(
    model: options.ModelName,
    trace: TraceName = "chat",
    policy: PolicyName = "slab",
    requests: NumRequests = 2000,
    rate: Rate = None,
    seed: Seed = 0,
    seconds: MaxSeconds = None,
    chunk_tokens: Chunk = 2048,
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
    """Requests on the block ledger: concurrency, waste, hits over time."""
    from kvstow.plan.pack import Site
    from kvstow.render.slab_history import SlabHistory
    from kvstow.simulate import Pace
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
    pace = Pace(chunk_tokens=chunk_tokens)
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

        html.write_text(
            simulation_page(what.model.name, trace, reports, histories), encoding="utf-8"
        )
        note(f"page written to {html}")
    if json:
        emit_json(_document(what.model.name, trace, len(lines), reports))
    else:
        emit_text(f"{what.model.name}, {len(lines)} requests of {trace}", _table(reports))


def _trace(name: str, requests: int, rate: float | None, seed: int) -> "list[TraceRequest]":
    from kvstow.simulate import MIXES, read_trace, synthetic

    if name in MIXES:
        return synthetic(name, num_requests=requests, rate=rate or float("inf"), seed=seed)
    return read_trace(Path(name))


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
    steps = None if seconds is None else max(1, round(seconds / pace.step_seconds))
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

        record = replay.run(max_steps=steps, progress=watch)
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
    }
    return table(("", *reports), [(name, *map(of, reports.values())) for name, of in rows.items()])
