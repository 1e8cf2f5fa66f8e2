"""Simulations as one self-contained page: curves over time, and a film of the slabs."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvstow import __version__
from kvstow.render.film import Film
from kvstow.render.page import page
from kvstow.simulate.replay import ReplaySample
from kvstow.simulate.report import ReplayReport

MAX_SAMPLES = 1200
"""Points of a curve: of a longer simulation every second, third … is drawn."""


def simulation_page(
    model: str, trace: str, reports: Mapping[str, ReplayReport], films: Mapping[str, Film]
) -> str:
    """The page: one curve per policy, one film per policy."""
    data = {
        "kvstow": __version__,
        "model": model,
        "trace": trace,
        "policies": {
            name: {
                "figures": report.figures(),
                "curves": _curves(report.samples),
                "film": films[name].record(),
            }
            for name, report in reports.items()
        },
    }
    return page(f"{model}: {trace} simulated", data, ("slabmap.js", "simulate.js"))


def _curves(samples: Sequence[ReplaySample]) -> dict[str, Any]:
    """Columns of numbers, by name; parts are of the bytes in use."""
    some = samples[:: max(1, -(-len(samples) // MAX_SAMPLES))]
    return {
        "seconds": [round(sample.seconds, 3) for sample in some],
        "requests": [sample.requests for sample in some],
        "waiting": [sample.waiting for sample in some],
        "in_use": [round(sample.waste.in_use) for sample in some],
        "cached": [sample.cached_bytes for sample in some],
        **{
            part: [_share(getattr(sample.waste, part), sample.waste.in_use) for sample in some]
            for part in ("padding", "fragmentation", "rounding")
        },
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 5) if whole else 0.0
