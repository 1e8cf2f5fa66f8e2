"""Reports: sums and means of samples made by hand."""

import pytest

from kvstow.simulate.replay import ReplayRecord, ReplaySample, Waste
from kvstow.simulate.report import ReplayReport, steady_part


def sample(requests: int, waiting: int, needed: float = 60.0) -> ReplaySample:
    return ReplaySample(0.0, requests, waiting, Waste(needed, 10.0, 20.0, 10.0), 0)


def test_a_report_counts_the_time_in_which_requests_wait_less_the_time_to_fill_up() -> None:
    filling, steady, draining = sample(1, 5), sample(9, 2), sample(3, 0)
    samples = [filling, steady, steady, draining]
    assert list(steady_part(samples)) == [steady, steady]
    report = ReplayReport.of(ReplayRecord(samples=samples))
    assert (report.mean_requests, report.peak_requests) == (9.0, 9)


def test_waste_is_in_parts_of_the_bytes_in_use() -> None:
    report = ReplayReport.of(ReplayRecord(samples=[sample(1, 0), sample(1, 0)]))
    assert report.waste == pytest.approx(
        {"padding": 0.1, "fragmentation": 0.2, "rounding": 0.1, "total": 0.4}
    )
    assert report.mean_bytes_in_use == 100.0


def test_ratios_are_of_what_was_counted() -> None:
    record = ReplayRecord(
        completed=3, preemptions=1, prompt_tokens=200, hit_tokens=50, rows=40, runs=8, admitted=4
    )
    record.fewest_runs = 4
    figures = ReplayReport.of(record).as_json()
    assert figures["hit_rate"] == 0.25
    assert figures["mean_run_rows"] == 5.0
    assert figures["runs_per_request"] == 2.0
    assert figures["runs_to_fewest"] == 2.0
    assert (figures["completed"], figures["preemptions"]) == (3, 1)


def test_a_replay_of_nothing_has_figures_of_zero() -> None:
    figures = ReplayReport.of(ReplayRecord()).as_json()
    assert figures["mean_requests"] == figures["hit_rate"] == figures["mean_run_rows"] == 0.0
    assert figures["waste"] == {"padding": 0, "fragmentation": 0, "rounding": 0, "total": 0}
