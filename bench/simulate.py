# ruff: noqa: E402
"""What slabs are worth: concurrency and waste against the union of all groups, and runs.

    python -P bench/simulate.py [--json FILE] [--steps N] [--churn-seconds S] [--part PART …]

`figures`    five models, 40 GiB, more chats waiting than fit: requests at once, waste
`catalogue`  every model that the catalogue has, 40 GiB: requests at once
`churn`      an hour at 90 % load: how many runs a newly admitted request's rows make
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [p for p in sys.path if os.path.abspath(p) != HERE]  # for bench.machine

import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np

from kvstow.plan.group import Group, grouped
from kvstow.plan.layout import Layout
from kvstow.plan.models import catalogue, model_layers
from kvstow.simulate import Pace, Replay, ReplayReport, synthetic
from kvstow.simulate.replay import POLICIES, layout_of

MODELS = ("deepseek-v4-flash", "gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b", "jamba-mini")
MEMORY = 40 << 30
CHURN_MEMORY = 16 << 30
AT_ONCE = float("inf")


def report(layout: Layout, steps: int, pace: Pace) -> ReplayReport:
    trace = synthetic("single", num_requests=40_000, rate=AT_ONCE, seed=1)
    return ReplayReport.of(Replay(layout, trace, pace).run(max_steps=steps))


def figures(steps: int) -> dict[str, object]:
    """Requests at once and waste of both policies, with more waiting than fit."""
    results: dict[str, object] = {}
    for name in MODELS:
        groups = grouped(model_layers(name).layers)
        reports = {
            policy: report(layout_of(policy, groups, budget=MEMORY), steps, Pace())
            for policy in POLICIES
        }
        slab, union = reports["slab"], reports["union"]
        ratio = slab.mean_requests / union.mean_requests
        lost = slab.waste["padding"] + slab.waste["fragmentation"]
        results[name] = {policy: part.as_json() for policy, part in reports.items()} | {
            "ratio": ratio,
            "padding_and_fragmentation": lost,
        }
        print(
            f"{name:20} {slab.mean_requests:8.1f} requests at once, {ratio:5.3f} × union; "
            f"padding {slab.waste['padding']:.2%}, fragmentation "
            f"{slab.waste['fragmentation']:.2%}, rounding {slab.waste['rounding']:.2%}",
            flush=True,
        )
    return results


FEWER = (0, 1, 2, 4, 8, 20)


def nearby(union: Layout, groups: tuple[Group, ...], steps: int) -> dict[int, float]:
    """Requests at once of the union that has a few slabs fewer: how much chance there is in it.

    Who waits a step longer for a slab or two changes all that follows, in both directions.
    """
    layouts = {
        fewer: layout_of("union", groups, num_slabs=union.num_slabs - fewer) for fewer in FEWER
    }
    return {n: report(layout, steps, Pace()).mean_requests for n, layout in layouts.items()}


def every_model(steps: int) -> dict[str, object]:
    """Requests at once, as a ratio to the union, for the whole catalogue; where it is below
    one, also what the union reaches nearby."""
    results: dict[str, float] = {}
    unions: dict[str, dict[int, float]] = {}
    for name in catalogue():
        groups = grouped(model_layers(name).layers)
        layouts = {p: layout_of(p, groups, budget=MEMORY) for p in POLICIES}
        if layouts["slab"].groups == layouts["union"].groups:
            results[name] = 1.0  # one and the same layout
            continue
        means = {p: report(layout, steps, Pace()).mean_requests for p, layout in layouts.items()}
        results[name] = means["slab"] / means["union"]
        if results[name] < 1:
            unions[name] = nearby(layouts["union"], groups, steps)
        print(
            f"{name:28} {means['slab']:9.2f} requests at once, {results[name]:.6f} × union",
            flush=True,
        )
    worst = min(results, key=lambda name: results[name])
    print(f"{len(results)} models, worst {worst}: {results[worst]:.6f} × union")
    for name, means in unions.items():
        print(f"{name}: the union with a few slabs fewer: {means}")
    return {"catalogue": results, "union_with_fewer_slabs": unions}


def churn(seconds: float) -> dict[str, object]:
    """Runs of newly admitted requests in the last tenth of the time, at 90 % load."""
    results: dict[str, object] = {}
    pace = Pace(step_seconds=0.05, prefill_rate=float("inf"), load=0.9, sample_steps=64)
    for name in MODELS:
        layout = layout_of("slab", grouped(model_layers(name).layers), budget=CHURN_MEMORY)
        steps = round(seconds / pace.step_seconds)
        trace = synthetic("single", num_requests=20 * steps, rate=AT_ONCE, seed=2)
        replay = Replay(layout, trace, pace)
        record = replay.run(max_steps=steps * 9 // 10)
        record.rows = record.runs = record.fewest_runs = record.admitted = 0
        late = ReplayReport.of(replay.run(max_steps=steps))
        results[name] = {
            "runs_to_fewest": late.runs_to_fewest,
            "runs_per_request": late.runs_per_request,
            "mean_run_rows": late.mean_run_rows,
            "admitted": record.admitted,
        }
        print(
            f"{name:20} {late.runs_per_request:6.1f} runs per request, "
            f"{late.runs_to_fewest:5.2f} × the fewest, {late.mean_run_rows:6.1f} rows per run",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--churn-seconds", type=float, default=3600)
    parts = ("figures", "catalogue", "churn")
    parser.add_argument("--part", action="append", choices=parts)
    options = parser.parse_args()
    machine = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    print(machine, file=sys.stderr)
    start = time.perf_counter()
    document: dict[str, object] = {"machine": machine, "steps": options.steps}
    for part in options.part or parts:
        match part:
            case "figures":
                document[part] = figures(options.steps)
            case "catalogue":
                document |= every_model(options.steps)
            case _:
                document["churn_seconds"] = options.churn_seconds
                document[part] = churn(options.churn_seconds)
    document["seconds"] = time.perf_counter() - start
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
