"""`kvstow simulate`: a trace of requests on the block ledger, under one or two policies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
    write_file,
)
from kvstow.errors import TraceError
from kvstow.plan.deployment import Deployment, RankLayers
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
    typer.Option("--policy", help="slab: kvstow's packing; union: both, side by side."),
]
NumRequests = Annotated[
    int, typer.Option("--requests", min=1, help="Requests of a synthetic trace.")
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        min=0.001,
        help="Requests per second of a synthetic trace.",
        show_default="all at once",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the synthetic trace.")]
MaxSeconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        min=0.1,
        max=MAX_SECONDS,
        help="Stop after so many simulated seconds.",
        show_default="the end of the trace",
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk-tokens",
        min=1,
        help="Most tokens of a prompt computed in one step.",
        show_default="2048",
    ),
]
PrefillRate = Annotated[
    float | None,
    typer.Option(
        "--prefill-rate",
        min=0.001,
        metavar="TOKENS",
        help="Prompt tokens computed per second.",
        show_default="no limit",
    ),
]
DecodeRate = Annotated[
    float | None,
    typer.Option(
        "--decode-rate",
        min=0.001,
        metavar="TOKENS",
        help="Tokens decoded per second, all requests together.",
        show_default="no limit",
    ),
]
StepSeconds = Annotated[
    float | None,
    typer.Option(
        "--step-seconds",
        min=0.0001,
        help="Shortest time that a step takes.",
        show_default="0.025",
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="An engine's rates as JSON, such as kvstow bench serving writes; the options "
        "above override it.",
        show_default=False,
    ),
]


def simulate(
    model: options.ModelName,
    trace: TraceName = "chat",
    policy: PolicyName = "slab",
    requests: NumRequests = 2000,
    rate: Rate = None,
    seed: Seed = 0,
    seconds: MaxSeconds = None,
    chunk_tokens: Chunk = None,
    prefill_rate: PrefillRate = None,
    decode_rate: DecodeRate = None,
    step_seconds: StepSeconds = None,
    profile: ProfileFile = None,
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
    held = on_rank(deployment, rank)
    made: dict[str, Any] = {"requests": requests, "rate": rate, "seed": seed}
    asked = {
        "prefill_rate": prefill_rate,
        "decode_rate": decode_rate,
        "chunk_tokens": chunk_tokens,
        "step_seconds": step_seconds,
    }
    simulation = Simulation(
        held=held,
        trace_name=trace,
        made=made,
        trace=_trace(trace, **made),
        pace=_pace(profile, asked),
        policies=("slab",) if policy == "slab" else ("slab", policy),
        seconds=seconds,
    )
    replays = simulation.run()
    if html is not None:
        write_file(html, simulation.page(replays))
        note(f"page written to {html}")
    emit_json(simulation.document(replays)) if json else emit_text(*simulation.text(replays))


Replays = Mapping[str, tuple["ReplayReport", "SlabHistory"]]
"""By policy, what happened, and who held the slabs when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A trace of requests on one rank of a deployment, at an engine's pace."""

    held: RankLayers
    trace_name: str
    made: dict[str, Any]
    """What shaped a synthetic trace: `requests`, `rate`, `seed`."""
    trace: "list[TraceRequest]"
    pace: "Pace"
    policies: tuple[Policy, ...]
    seconds: float | None
    """Simulated seconds after which to stop."""

    def run(self) -> Replays:
        """Replay the trace under every policy, with bars on stderr."""
        from kvstow.plan.pack import Site
        from kvstow.simulate.replay import layout_of

        asked = self.held.deployment
        site = Site(model=self.held.model.name, alignment=asked.alignment)
        layouts = {
            name: layout_of(
                name, self.held.groups, budget=asked.budget, num_slabs=asked.num_slabs, site=site
            )
            for name in self.policies
        }
        return {
            name: _replayed(name, layout, self.trace, self.pace, self.seconds)
            for name, layout in layouts.items()
        }

    def document(self, replays: Replays) -> dict[str, Any]:
        return {
            "model": self.held.model.name,
            "trace": self.trace_name,
            "requests": len(self.trace),
            "policies": {name: report.figures() for name, (report, _) in replays.items()},
        }

    def text(self, replays: Replays) -> list[str]:
        head = f"{self.held.model.name}, {counted(len(self.trace), 'request')} of {self.trace_name}"
        if all(request.arrival == self.trace[0].arrival for request in self.trace):
            head += ", all at once"
        reports = {name: report for name, (report, _) in replays.items()}
        return [head, _table(reports), _step_words(self.pace)]

    def page(self, replays: Replays) -> str:
        from kvstow.render.data import simulation_page
        from kvstow.simulate import MIXES

        made = self.made if self.trace_name in MIXES else {}
        settings = {"trace": self.trace_name, "policy": self.policies[-1], **made}
        settings |= {"seconds": self.seconds, "rank": self.held.rank}
        about = _about(self.held.deployment, self.pace, settings)
        about |= {"requests": len(self.trace), "seed": made.get("seed")}
        reports = {name: report for name, (report, _) in replays.items()}
        histories = {name: history for name, (_, history) in replays.items()}
        return simulation_page(
            self.held.model.name, self.trace_name, reports, histories, about=about
        )


def _pace(profile: Path | None, asked: dict[str, Any]) -> "Pace":
    """The pace asked for; where nothing is, the profile's, then the usual one."""
    from kvstow.simulate import Pace, read_profile

    pace = Pace()
    try:
        if profile is not None:
            pace = read_profile(profile).pace(pace)
    except TraceError as error:
        refuse(str(error), code=MISUSED)
    return replace(pace, **{name: value for name, value in asked.items() if value is not None})


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
    said += [part for wish in deployment.alignment.wishes() for part in ("--align", wish)]
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


def _trace(name: str, *, requests: int, rate: float | None, seed: int) -> "list[TraceRequest]":
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
) -> "tuple[ReplayReport, SlabHistory]":
    """Replay with a bar on stderr, and remember its slabs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvstow.render.slab_history import SlabHistory
    from kvstow.simulate import Replay, ReplayReport

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
    )
    replay, history = Replay(layout, trace, pace), SlabHistory()
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
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
    return ReplayReport.of(record), history


def _table(reports: "Mapping[str, ReplayReport]") -> str:
    def percent(value: float) -> str:
        return f"{100 * value:.2f} %"

    def milliseconds(value: float) -> str:
        return f"{1e3 * value:,.0f} ms" if value else "–"

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
