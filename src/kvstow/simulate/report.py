"""ReplayReport: what a replay says about a policy, as numbers with stable names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

from kvstow.simulate.replay import ReplayRecord, ReplaySample, shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Figures of one policy; waste in parts of the bytes in use."""

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
            first_token_seconds=spread(record.first_token_seconds),
            token_seconds=spread(record.token_seconds),
            samples=tuple(record.samples),
        )

    def figures(self) -> dict[str, object]:
        """Everything but the samples, ready for JSON."""
        names = [field.name for field in fields(self) if field.name != "samples"]
        return {name: getattr(self, name) for name in names}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and the value that 95 of 100 do not exceed; zeros where there are none."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": ordered[last // 2],
        "p95": ordered[-(-95 * last // 100)],
    }


def steady_part(samples: Sequence[ReplaySample]) -> Sequence[ReplaySample]:
    """Samples of the time in which requests were waiting, less the time it took to fill up;
    all of them if nobody ever had to wait."""
    full = [s for s in samples if s.waiting]
    return cast(Sequence[ReplaySample], full[len(full) // 3 :] if len(full) >= 3 else samples)
