"""ReplayReport: what a replay says about a policy, as numbers with stable names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
            samples=tuple(record.samples),
        )

    def figures(self) -> dict[str, object]:
        """Everything but the samples, ready for JSON."""
        return {
            "mean_requests": self.mean_requests,
            "peak_requests": self.peak_requests,
            "completed": self.completed,
            "preemptions": self.preemptions,
            "mean_bytes_in_use": self.mean_bytes_in_use,
            "waste": dict(self.waste),
            "hit_rate": self.hit_rate,
            "mean_run_rows": self.mean_run_rows,
            "runs_per_request": self.runs_per_request,
            "runs_to_fewest": self.runs_to_fewest,
        }


def steady_part(samples: Sequence[ReplaySample]) -> Sequence[ReplaySample]:
    """Samples of the time in which requests were waiting, less the time it took to fill up;
    all of them if nobody ever had to wait."""
    full = [s for s in samples if s.waiting]
    return cast(Sequence[ReplaySample], full[len(full) // 3 :] if len(full) >= 3 else samples)
