"""What a simulation says: times, hits and memory of a trace, for one or several policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from textwrap import wrap
from typing import Any, cast

from kvstow.plan.view import ceil_div
from kvstow.simulate.replay import Pace, ReplayRecord, ReplaySample, shares
from kvstow.text import human, plural, table

MOST_WAITING = 0.2
"""The part of the time in which requests may wait before they are more than can be served."""

ASSUMED = "These rates are assumed: give those of your engine."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Figures of one policy; waste as shares of the bytes in use."""

    mean_requests: float
    peak_requests: int
    completed: int
    preemptions: int
    mean_bytes_in_use: float
    waste: Mapping[str, float]
    hit_rate: float
    mean_run_rows: float
    runs_per_request: float
    runs_to_fewest: float
    seconds: float
    output_tokens_per_second: float
    first_token_seconds: Mapping[str, float]
    token_seconds: Mapping[str, float]
    waiting: float
    """Part of the time in which requests waited for memory or for their prompts' turn."""
    samples: Sequence[ReplaySample]

    @staticmethod
    def of(record: ReplayRecord) -> "ReplayReport":
        steady = steady_part(record.samples)
        return ReplayReport(
            mean_requests=sum(s.requests for s in steady) / max(1, len(steady)),
            peak_requests=max((s.requests for s in record.samples), default=0),
            completed=record.completed,
            preemptions=record.preemptions,
            mean_bytes_in_use=sum(s.waste.in_use for s in steady) / max(1, len(steady)),
            waste=shares([s.waste for s in steady]),
            hit_rate=record.hit_tokens / max(1, record.prompt_tokens),
            mean_run_rows=record.rows / max(1, record.runs),
            runs_per_request=record.runs / max(1, record.admitted),
            runs_to_fewest=record.runs / max(1, record.fewest_runs),
            seconds=record.seconds,
            output_tokens_per_second=record.output_tokens / max(record.seconds, 1e-9),
            first_token_seconds=percentiles(record.first_token_seconds),
            token_seconds=percentiles(record.token_seconds),
            waiting=sum(s.waiting > 0 for s in record.samples) / max(1, len(record.samples)),
            samples=tuple(record.samples),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything but the samples."""
        names = [field.name for field in fields(self) if field.name != "samples"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """A trace of requests on one arena, under one or several packing policies."""

    model: str
    trace: str
    num_requests: int
    rate: float
    """Requests per second; infinite where all come at once."""
    pace: Pace
    policies: Mapping[str, ReplayReport]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "trace": self.trace,
            "requests": self.num_requests,
            "pace": str(self.pace),
            "policies": {name: report.as_json() for name, report in self.policies.items()},
            "notes": list(self.notes),
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """What is assumed, and that more requests arrive than are served."""
        assumed = ASSUMED if self.pace == Pace() else ""
        return tuple(filter(None, (assumed, self._overload())))

    def __str__(self) -> str:
        when = "all at once" if self.rate == float("inf") else f"{self.rate:.3g} per second"
        head = f"{self.model}: {plural(self.num_requests, 'request')} of {self.trace}, {when}"
        figures = table(("", *self.policies), self.lines())
        return "\n".join(
            [head, "", figures, "", *wrap(" ".join((str(self.pace), *self.notes)), 80)]
        )

    def _overload(self) -> str:
        """How many requests per second the first policy keeps up with, where more arrive."""
        first = next(iter(self.policies.values()))
        if self.rate == float("inf") or first.waiting < MOST_WAITING:
            return ""
        served = first.completed / max(first.seconds, 1e-9)
        return (
            f"More requests arrive than it serves: it keeps up with about {served:.2g} per second. "
            "Try that --rate, or more --memory."
        )

    def lines(self) -> list[tuple[str, ...]]:
        """Every figure by its name, with a text for each policy."""
        return [(name, *map(of, self.policies.values())) for name, of in _LINES.items()]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _milliseconds(value: float) -> str:
    return f"{1e3 * value:,.0f} ms" if value else "–"


_LINES: dict[str, Callable[[ReplayReport], str]] = {
    "first token, median": lambda r: _milliseconds(r.first_token_seconds["p50"]),
    "first token, 95th percentile": lambda r: _milliseconds(r.first_token_seconds["p95"]),
    "time per output token, mean": lambda r: _milliseconds(r.token_seconds["mean"]),
    "output tokens per second": lambda r: f"{r.output_tokens_per_second:,.0f}",
    "prompt tokens found cached": lambda r: _percent(r.hit_rate),
    "time with requests waiting": lambda r: _percent(r.waiting),
    "requests at once, mean": lambda r: f"{r.mean_requests:,.1f}",
    "requests at once, peak": lambda r: f"{r.peak_requests:,}",
    "completed": lambda r: f"{r.completed:,}",
    "preemptions": lambda r: f"{r.preemptions:,}",
    "simulated seconds": lambda r: f"{r.seconds:,.1f}",
    "bytes in use, mean": lambda r: human(round(r.mean_bytes_in_use)),
    "  padding": lambda r: _percent(r.waste["padding"]),
    "  slab fragmentation": lambda r: _percent(r.waste["fragmentation"]),
    "  block rounding": lambda r: _percent(r.waste["rounding"]),
    "rows per run": lambda r: f"{r.mean_run_rows:.1f}",
    "runs per request": lambda r: f"{r.runs_per_request:.1f}",
}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and the value that 95 of 100 do not exceed; zeros where there are none."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": ordered[last // 2],
        "p95": ordered[ceil_div(95 * last, 100)],
    }


def steady_part(samples: Sequence[ReplaySample]) -> Sequence[ReplaySample]:
    """Samples of the time in which requests were waiting, less the time it took to fill up;
    all of them if nobody ever had to wait."""
    full = [s for s in samples if s.waiting]
    return cast(Sequence[ReplaySample], full[len(full) // 3 :] if len(full) >= 3 else samples)
