"""Columns of bench/serving.py are those that `vllm bench serve` makes of the same answers."""

from itertools import pairwise
from pathlib import Path
from random import Random
from runpy import run_path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BENCH = Path(__file__).parents[2] / "bench" / "serving.py"  # the tests have a module of that name


def test_columns_are_those_of_vllm_bench_serve():
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    bench = run_path(str(BENCH))
    draw, answers, outputs = Random(3), [], []
    for length in (1, 2, 8, 8, 30):
        began = draw.random()
        times = [began + 0.2 + draw.random()]
        for _ in range(length - 1):
            times.append(times[-1] + draw.random() / 50)
        answers.append(bench["Answer"](began, times, 100 + length, [7] * length))
        outputs.append(
            RequestFuncOutput(
                success=True,
                start_time=began,
                latency=times[-1] - began,
                ttft=times[0] - began,
                itl=[b - a for a, b in pairwise(times)],
                output_tokens=length,
                prompt_len=100 + length,
            )
        )
    theirs, _ = calculate_metrics([], outputs, 4.0, None, [99.0], {})
    found = bench["columns"](answers, 4.0)
    assert found.pop("duration") == 4.0
    assert found.pop("total_input_tokens") == theirs.total_input
    assert found.pop("total_output_tokens") == theirs.total_output
    for name, value in found.items():
        if name.startswith("p99_"):
            ((_, expected),) = getattr(theirs, f"percentiles_{name.removeprefix('p99_')}")
        else:
            expected = getattr(theirs, name)
        assert value == pytest.approx(expected, abs=1e-3), name
