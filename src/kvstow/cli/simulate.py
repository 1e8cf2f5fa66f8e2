"""`kvstow simulate`: a trace of requests on the block ledger, under one or two policies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvstow.cli import options
from kvstow.cli.options import on_rank, planning
from kvstow.cli.output import (
    command_line,
    refuse,
    reporting,
    slow_progress,
    usage,
    write_file,
)
from kvstow.errors import PlanError, TraceError
from kvstow.plan.sizing.plan import Deployment, Plan

if TYPE_CHECKING:
    from kvstow.plan.layout import Layout
    from kvstow.render.data import SlabHistory
    from kvstow.simulate import Pace, ReplayReport, SimulationReport, TraceRequest

Policy = Literal["slab", "union"]

MAX_SECONDS = 1e12

TraceName = Annotated[
    str,
    typer.Option(
        metavar="MIX|FILE",
        help="chat, agent, document, single, or a file: JSON lines, Mooncake's or Azure's trace.",
    ),
]
PolicyName = Annotated[
    Policy, typer.Option(help="slab: kvstow's packing; union: both, side by side.")
]
NumRequests = Annotated[int, typer.Option(min=1, help="Requests of a synthetic trace.")]
Rate = Annotated[
    float,
    typer.Option(min=0.001, help="Requests per second of a synthetic trace; inf: all at once."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the synthetic trace.")]
MaxSeconds = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        max=MAX_SECONDS,
        help="Stop after this many simulated seconds.",
        show_default="the end of the trace",
    ),
]
Chunk = Annotated[int, typer.Option(min=1, help="Most tokens of a prompt computed in one step.")]
PrefillRate = Annotated[
    float,
    typer.Option(
        min=0.001,
        metavar="TOKENS",
        help="Prompt tokens computed per second; inf: they take no time.",
    ),
]
DecodeRate = Annotated[
    float,
    typer.Option(
        min=0.001,
        metavar="TOKENS",
        help="Tokens decoded per second, all requests together.",
        show_default="no limit",
    ),
]
StepSeconds = Annotated[float, typer.Option(min=0.0001, help="Shortest time that a step takes.")]


@reporting
@planning
def simulate(
    context: typer.Context,
    deployment: Deployment,
    rank: int,
    trace: TraceName = "chat",
    policy: PolicyName = "slab",
    requests: NumRequests = 1000,
    rate: Rate = 4.0,
    seed: Seed = 0,
    seconds: MaxSeconds = None,
    chunk_tokens: Chunk = 2048,
    prefill_rate: PrefillRate = 10_000.0,
    decode_rate: DecodeRate = float("inf"),
    step_seconds: StepSeconds = 0.025,
    html: options.HtmlFile = None,
) -> "SimulationReport":
    """Replay requests: time to first token, hits, waste.

    A step takes the longer of --step-seconds and decoded tokens / --decode-rate, and
    prompt tokens / --prefill-rate on top. Prompt tokens that are found cached take no time.
    """
    from kvstow.simulate import MIXES, Pace, SimulationReport

    plan = on_rank(deployment, rank)
    pace = Pace(
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        chunk_tokens=chunk_tokens,
        step_seconds=step_seconds,
    )
    is_synthetic = trace in MIXES
    replayed = _trace(trace, requests=requests, rate=rate, seed=seed)
    policies: tuple[Policy, ...] = ("slab",) if policy == "slab" else ("slab", policy)
    with usage(PlanError, TraceError):
        replays = {name: _replay(name, plan, replayed, pace, seconds) for name in policies}
    report = SimulationReport(
        model=plan.model,
        trace=trace,
        num_requests=len(replayed),
        rate=rate if is_synthetic else _rate(replayed),
        pace=pace,
        policies={name: report for name, (report, _) in replays.items()},
    )
    if html is not None:
        from kvstow.render.data import simulation_page

        about = {
            "requests": len(replayed),
            "seed": seed if is_synthetic else None,
            "arena_bytes": deployment.budget,
            "step": str(pace),
            "command": command_line(context),
        }
        histories = {name: history for name, (_, history) in replays.items()}
        write_file(html, simulation_page(report, histories, about=about), "page")
    return report


def _trace(name: str, *, requests: int, rate: float, seed: int) -> "list[TraceRequest]":
    from kvstow.simulate import MIXES, read_trace, synthetic

    if name in MIXES:
        return synthetic(name, num_requests=requests, rate=rate, seed=seed)
    if not Path(name).exists():
        refuse(f"--trace {name}: neither a file nor one of {', '.join(MIXES)}")
    with usage(TraceError):
        return read_trace(Path(name))


def _rate(trace: "list[TraceRequest]") -> float:
    """Requests per second, as they arrive."""
    took = trace[-1].arrival - trace[0].arrival
    return (len(trace) - 1) / took if took else float("inf")


def _replay(
    policy: Policy,
    plan: Plan,
    trace: "list[TraceRequest]",
    pace: "Pace",
    seconds: float | None,
) -> "tuple[ReplayReport, SlabHistory]":
    """Replay, say on stderr how far that is, and remember the slabs."""
    from kvstow.render.data import SlabHistory
    from kvstow.simulate import Replay, ReplayReport

    replay, history = Replay(_layout(policy, plan), trace, pace), SlabHistory()
    say = slow_progress("requests")

    def watch(done: int, total: int) -> None:
        say(done, total)
        history.see(replay)

    record = replay.run(max_seconds=seconds or float("inf"), progress=watch)
    return ReplayReport.of(record), history


def _layout(policy: Policy, plan: Plan) -> "Layout":
    from kvstow.plan.pack import Site
    from kvstow.simulate.replay import layout_of

    deployment = plan.deployment
    return layout_of(
        policy,
        plan.groups,
        budget=deployment.budget,
        num_slabs=deployment.num_slabs,
        site=Site(model=plan.model, alignment=deployment.alignment),
    )
