"""The simulator: traces, made-up and read, and what a replay says about them."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from block_layouts import HYBRID, RECURRENT, packed_layout
from kvstow.cli import app
from kvstow.errors import TraceError
from kvstow.plan.group import grouped
from kvstow.plan.models import model_layers
from kvstow.simulate import (
    MIXES,
    Pace,
    Replay,
    ReplayReport,
    TraceRequest,
    read_trace,
    synthetic,
    write_trace,
)
from kvstow.simulate.replay import layout_of
from kvstow.simulate.trace import output_of, prompt_of

INF = float("inf")


def replayed(layout, trace, **pace) -> Replay:
    replay = Replay(layout, trace, Pace(**{"sample_steps": 1} | pace))
    replay.run()
    return replay


# ── traces ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mix", MIXES)
def test_a_made_up_trace_survives_a_file(mix: str, tmp_path: Path) -> None:
    trace = synthetic(mix, num_requests=50, rate=3.0, seed=4)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace
    assert trace == synthetic(mix, num_requests=50, rate=3.0, seed=4)
    assert trace != synthetic(mix, num_requests=50, rate=3.0, seed=5)


def test_chats_are_as_long_as_they_say() -> None:
    trace = synthetic("chat", num_requests=4000, rate=10.0, seed=0)
    prompts = sorted(r.prompt_tokens for r in trace)
    outputs = sorted(r.output_tokens for r in trace)
    assert 650 < prompts[2000] < 750
    assert 235 < outputs[2000] < 265
    assert 350 < trace[-1].arrival < 450


def test_an_agents_next_turn_begins_with_all_before_it() -> None:
    trace = synthetic("agent", num_requests=300, rate=INF, seed=0)
    by_output = {r.output: (i, r) for i, r in enumerate(trace)}
    later = next(r for r in trace if any(name.startswith("answer") for name, _ in r.prefixes))
    name = next(name for name, _ in later.prefixes if name.startswith("answer"))
    number, earlier = by_output[name]
    words = prompt_of(trace.index(later), later, later.prompt_tokens).tokens.tolist()
    before = prompt_of(number, earlier, earlier.prompt_tokens).tokens.tolist()
    assert words[: len(before)] == before
    answer = output_of(number, earlier).tolist()
    assert words[len(before) : len(before) + len(answer)] == answer


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", ":2: "),
        ("[1]", ":2: Expected `object`"),
        ('{"arrival": 1, "prompt_tokens": 5}', "missing required field `output_tokens`"),
        ('{"arrival": 1, "prompt_tokens": 0, "output_tokens": 1}', "at least one of each"),
        ('{"arrival": -1, "prompt_tokens": 1, "output_tokens": 1}', "not a time"),
        ('{"arrival": 0.5, "prompt_tokens": 1, "output_tokens": 1}', "the one before at 1.0 s"),
        ('{"arrival": 2, "prompt_tokens": 1.5, "output_tokens": 1}', "Expected `int`"),
        ('{"arrival": 2, "prompt_tokens": 1, "output_tokens": 1, "speed": 3}', "speed"),
        ('{"arrival": 2, "prompt_tokens": 9, "output_tokens": 1, "prefixes": [["a", 10]]}',
         "prefixes have 10 tokens, the prompt 9"),
        ('{"arrival": 2, "prompt_tokens": 9, "output_tokens": 1, "prefixes": [["a", 0]]}',
         "tokens"),
        ('{"arrival": 2, "prompt_tokens": 9, "output_tokens": 1, "prefixes": [["a"]]}', "length"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_number(line: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 1, "prompt_tokens": 5, "output_tokens": 5}\n' + line + "\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert complaint in str(caught.value)
    assert f"{path}:2: " in str(caught.value)


def test_a_trace_without_requests_or_file_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(empty)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="no mix 'poetry'"):
        synthetic("poetry", num_requests=1, rate=1.0, seed=0)


# ── replays ───────────────────────────────────────────────────────────────────────────


def test_every_request_is_completed_and_everything_comes_back() -> None:
    trace = [TraceRequest(i * 0.01, 3 + i % 9, 1 + i % 5) for i in range(80)]
    for layers in (HYBRID, RECURRENT):
        replay = replayed(packed_layout(layers, 30), trace, chunk_tokens=4, prefill_tokens=12)
        assert replay.record.completed == 80
        assert len(replay.ledger) == 0
        replay.ledger.check()
        assert all(replay.ledger.pool.num_held(g) == 0 for g in range(2))


def test_a_pool_too_small_for_all_preempts_and_still_completes() -> None:
    trace = [TraceRequest(0.0, 2, 12) for _ in range(12)]
    replay = replayed(packed_layout(HYBRID, 9), trace, chunk_tokens=2)
    assert replay.record.preemptions > 0
    assert replay.record.completed == 12


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(
        TraceError, match="a request of 1001 tokens does not fit into an empty pool"
    ):
        Replay(packed_layout(HYBRID, 9), [TraceRequest(0.0, 1000, 1)], Pace())


def test_nobody_is_admitted_before_arriving() -> None:
    trace = [TraceRequest(0.0, 4, 2), TraceRequest(10.0, 4, 2)]
    replay = replayed(packed_layout(HYBRID, 30), trace)
    assert [s.requests for s in replay.record.samples if 1.0 < s.seconds < 9.9] == []
    assert replay.seconds >= 10.0
    assert replay.record.completed == 2


def test_shared_beginnings_are_found_cached() -> None:
    trace = [TraceRequest(float(i), 20, 2, (("system", 16),)) for i in range(10)]
    report = ReplayReport.of(replayed(packed_layout(HYBRID, 60), trace).record)
    assert report.hit_rate == pytest.approx(9 * 16 / 200)


def test_a_preempted_request_says_the_same_when_it_comes_again() -> None:
    request = TraceRequest(0.0, 20, 9, (("system", 12),))
    first = prompt_of(3, request, 20).tokens
    again = prompt_of(3, request, 25).tokens
    assert again[:20].tolist() == first.tolist()
    assert prompt_of(4, request, 20).tokens[12:].tolist() != first[12:].tolist()


def test_waste_adds_up_to_the_bytes_of_the_slabs_in_use() -> None:
    """Padding, gaps, rounding and content are all that a busy slab has; nothing is cached."""
    layout = packed_layout(RECURRENT, 40)
    trace = [TraceRequest(0.0, 3 + i % 9, 20) for i in range(40)]
    replay = Replay(layout, trace, Pace(sample_steps=1))
    for _ in range(30):
        replay.step()
        pool = replay.ledger.pool
        size = [rows.rows_per_slab for rows in layout.groups]
        busy = {
            (g, int(block) // size[g])
            for run in replay._running
            for g, part in replay.ledger.blocks(run.handle).items()
            for block in part.ids
        }
        assert replay.record.samples[-1].waste.in_use == len(busy) * layout.slab_bytes
        assert pool.num_stranded(0) == sum(size[0] for g, _ in busy if g == 0) - pool.num_held(0)


def test_tight_rows_serve_more_requests_than_the_union() -> None:
    groups = grouped(model_layers("gemma-3-27b").layers)
    trace = synthetic("chat", num_requests=120, rate=INF, seed=0)
    means = {}
    for policy in ("slab", "union"):
        layout = layout_of(policy, groups, budget=8 << 30)
        record = Replay(layout, trace, Pace()).run(max_steps=250)
        means[policy] = ReplayReport.of(record).mean_requests
    assert means["slab"] > 1.05 * means["union"]


def test_under_union_states_are_kept_where_attention_blocks_end() -> None:
    groups = grouped(model_layers("qwen3-next-80b").layers)
    layout = layout_of("union", groups, budget=8 << 30)
    assert len({rows.group.block_tokens for rows in layout.groups}) == 1
    assert all(rows.rows_per_slab == 1 for rows in layout.groups)


# ── the command ───────────────────────────────────────────────────────────────────────


def test_the_command_prints_the_agreed_keys_for_both_policies() -> None:
    result = CliRunner().invoke(app, ["simulate", "gemma-3-27b", "--memory", "6GiB", "--requests",
                                      "30", "--policy", "union", "--json"])  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert set(document["policies"]) == {"slab", "union"}
    for figures in document["policies"].values():
        assert figures["completed"] == 30
        assert {"mean_requests", "peak_requests", "preemptions", "hit_rate",
                "mean_run_rows", "runs_per_request"} <= set(figures)  # fmt: skip
        assert set(figures["waste"]) == {"padding", "fragmentation", "rounding", "total"}
        assert 0 <= figures["waste"]["total"] < 1


def test_the_command_draws_a_page_that_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["simulate", "gpt-oss-20b", "--memory", "2GiB", "--requests",
                                      "20", "--html", str(page)])  # fmt: skip
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
