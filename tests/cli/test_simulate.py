"""`kvstow simulate`: its keys, its page, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstow.cli import app
from kvstow.simulate.trace import TraceRequest, write_trace


def test_the_command_prints_the_agreed_keys_for_both_policies() -> None:
    result = CliRunner().invoke(
        app,
        [
            "simulate",
            "gemma-3-27b",
            "--memory",
            "6GiB",
            "--requests",
            "30",
            "--policy",
            "union",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert set(document["policies"]) == {"slab", "union"}
    for figures in document["policies"].values():
        assert figures["completed"] == 30
        assert {
            "mean_requests",
            "peak_requests",
            "preemptions",
            "hit_rate",
            "mean_run_rows",
            "runs_per_request",
        } <= set(figures)
        assert set(figures["waste"]) == {"padding", "fragmentation", "rounding", "total"}
        assert 0 <= figures["waste"]["total"] < 1


def test_the_command_draws_a_page_that_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(
        app,
        ["simulate", "gpt-oss-20b", "--memory", "2GiB", "--requests", "20", "--html", str(page)],
    )
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert "gpt-oss-20b" in text
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert "requests at once, mean" in result.stdout


def test_the_command_replays_a_file_and_refuses_a_bad_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRequest(0.0, 100, 10), TraceRequest(1.0, 200, 10)])
    command = ["simulate", "gpt-oss-20b", "--memory", "1GiB", "--trace", str(path), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] == 2
    path.write_text("nonsense")
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert f"{path}:1: " in refused.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--seconds", "1e308"), 2),
        (("--requests", str(10**18)), 1),
        (("--requests", "2", "--memory", "8000TiB"), 1),
    ],
)
def test_sizes_beyond_all_machines_end_with_a_message(words: tuple[str, ...], code: int) -> None:
    result = CliRunner().invoke(app, ["simulate", "smollm2-135m", "--memory", "1GiB", *words])
    assert result.exit_code == code
    assert isinstance(result.exception, SystemExit)
    assert result.stderr
