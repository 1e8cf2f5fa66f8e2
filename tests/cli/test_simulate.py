"""`kvstow simulate`: its keys, its page, and what it refuses."""

import json
import re
import shlex
from pathlib import Path

import pytest

from commands import document, invoke
from kvstow.simulate.trace import TraceRequest, write_trace


def test_the_command_prints_the_agreed_keys_for_both_policies() -> None:
    shape = ("--memory", "6GiB", "--requests", "30", "--policy", "union")
    policies = document("simulate", "gemma-3-27b", *shape)["policies"]
    assert set(policies) == {"slab", "union"}
    for figures in policies.values():
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


def test_without_options_chats_arrive_over_time_share_beginnings_and_are_answered_soon() -> None:
    found = document("simulate", "llama-3.1-8b", "--memory", "40GiB")
    figures = found["policies"]["slab"]
    assert (found["trace"], figures["completed"]) == ("chat", found["requests"])
    assert 0.025 < figures["first_token_seconds"]["p50"] < figures["first_token_seconds"]["p95"] < 1
    assert figures["hit_rate"] > 0.5
    assert figures["seconds"] > 60


def test_the_answer_begins_with_times_and_says_what_was_assumed() -> None:
    command = ["simulate", "gpt-oss-20b", "--memory", "1GiB", "--requests", "9"]
    text = invoke(*command).stdout
    assert text.startswith("gpt-oss-20b: 9 requests of chat, 4 per second\n")
    assert "first token, median" in text.splitlines()[4]
    assert "rates are assumed" in " ".join(text.split())
    told = invoke(*command, "--prefill-rate", "500", "--rate", "inf").stdout
    assert told.startswith("gpt-oss-20b: 9 requests of chat, all at once\n")
    assert "assumed" not in told


def test_the_command_replays_a_file_and_refuses_a_bad_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRequest(0.0, 100, 10), TraceRequest(1.0, 200, 10)])
    command = ["simulate", "gpt-oss-20b", "--memory", "1GiB", "--trace", str(path), "--json"]
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] == 2
    path.write_text("nonsense")
    refused = invoke(*command)
    assert refused.exit_code == 2
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
    result = invoke("simulate", "smollm2-135m", "--memory", "1GiB", *words)
    assert result.exit_code == code
    assert result.stderr


def simulated(*arguments: str) -> dict:
    return document("simulate", "gpt-oss-20b", *arguments)["policies"]["slab"]


def test_times_follow_from_the_rates(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    write_trace(path, [TraceRequest(0.0, 2000, 100)])
    rates = ["--prefill-rate", "1000", "--decode-rate", "50", "--step-seconds", "0.01"]
    figures = simulated("--memory", "1GiB", "--trace", str(path), *rates)
    assert figures["first_token_seconds"]["p50"] == pytest.approx(2000 / 1000 + 0.01)
    assert figures["token_seconds"]["mean"] == pytest.approx(1 / 50)
    assert figures["seconds"] == pytest.approx(2.01 + 100 / 50)
    assert figures["output_tokens_per_second"] == pytest.approx(100 / 4.01)


def test_the_command_on_the_page_makes_the_page_again(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shape = ["--requests", "20", "--seconds", "1", "--rank", "1", "--tp", "2"]
    aligned = ["--align", "page=256", "--align", "*.0.*=12288"]
    first = simulated(*shape, *aligned, "--html", str(page))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    words = shlex.split(data["command"])
    assert all(each in words for each in ("--seconds", "--rank", "page=256", "*.0.*=12288"))
    assert simulated(*words[3:]) == first


def test_what_was_never_measured_is_not_0_milliseconds() -> None:
    shape = ["simulate", "llama-3.1-8b", "--requests", "20", "--seconds", "1"]
    shown = invoke(*shape).stdout
    assert re.search(r"time per output token, mean +–", shown)
    assert re.search(r"first token, median +[1-9][0-9,]* ms", shown)


def test_a_request_too_long_for_the_arena_is_answered_with_what_helps(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TraceRequest(arrival=0.0, prompt_tokens=10**6, output_tokens=1)])
    result = invoke("simulate", "llama-3.1-8b", "--memory", "1GiB", "--trace", str(trace))
    assert result.exit_code == 2
    assert "release a request" not in result.stderr
    assert "a request of 1,000,001 tokens does not fit into an empty pool of 1 GiB" in (
        result.stderr
    )
    assert "hint: " in result.stderr


def test_where_more_requests_arrive_than_are_served_it_says_how_many_are() -> None:
    shape = ["simulate", "llama-3.1-8b", "--memory", "1GiB", "--requests", "100"]
    shown = " ".join(invoke(*shape).stdout.split())
    rate = re.search(r"keeps up with about ([0-9.]+) per second", shown)[1]
    assert float(rate) < 4
    notes = " ".join(document(*shape)["notes"])
    assert f"keeps up with about {rate} per second" in notes
    assert "rates are assumed" in notes
    slower = invoke(*shape, "--rate", str(float(rate) / 2)).stdout
    assert "keeps up" not in slower
