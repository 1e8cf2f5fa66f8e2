"""Traces: made up, written, read, refused; and the tokens of their requests."""

from pathlib import Path

import pytest

from kvstow.errors import TraceError
from kvstow.simulate.trace import (
    MIXES,
    TraceRequest,
    output_of,
    prompt_of,
    read_trace,
    synthetic,
    write_trace,
)

INF = float("inf")


@pytest.mark.parametrize("mix", MIXES)
def test_a_made_up_trace_survives_a_file(mix: str, tmp_path: Path) -> None:
    trace = synthetic(mix, num_requests=50, rate=3.0, seed=4)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace
    assert trace == synthetic(mix, num_requests=50, rate=3.0, seed=4)
    assert trace != synthetic(mix, num_requests=50, rate=3.0, seed=5)


def test_single_requests_are_as_long_as_they_say() -> None:
    trace = synthetic("single", num_requests=4000, rate=10.0, seed=0)
    prompts = sorted(r.prompt_tokens for r in trace)
    outputs = sorted(r.output_tokens for r in trace)
    assert 650 < prompts[2000] < 750
    assert 235 < outputs[2000] < 265
    assert 350 < trace[-1].arrival < 450


def test_chats_have_few_system_prompts_and_about_four_turns() -> None:
    trace = synthetic("chat", num_requests=4000, rate=4.0, seed=0)
    assert len({request.prefixes[0] for request in trace}) == 8
    first_turns = sum(len(request.prefixes) == 2 for request in trace)
    assert 3.5 < len(trace) / first_turns < 4.5
    assert 235 < sorted(request.output_tokens for request in trace)[2000] < 265


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
        ('{"arrival": 2, "prompt_tokens": 1.5, "output_tokens": 1}', "Expected `int`"),
        ('{"arrival": 2, "prompt_tokens": 1, "output_tokens": 1, "speed": 3}', "speed"),
        (
            '{"arrival": 2, "prompt_tokens": 9, "output_tokens": 1, "prefixes": [["a", 10]]}',
            "prefixes have 10 tokens, the prompt 9",
        ),
        (
            '{"arrival": 2, "prompt_tokens": 9, "output_tokens": 1, "prefixes": [["a", 0]]}',
            "tokens",
        ),
        ('{"arrival": 2, "prompt_tokens": 9, "output_tokens": 1, "prefixes": [["a"]]}', "length"),
        ('{"arrival": 1e308, "prompt_tokens": 9, "output_tokens": 1}', "not a time"),
        ('{"arrival": 2, "prompt_tokens": 9, "output_tokens": 1000000000000000000}', "at most"),
    ],
)
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


def test_a_preempted_request_says_the_same_when_it_comes_again() -> None:
    request = TraceRequest(0.0, 20, 9, (("system", 12),))
    first = prompt_of(3, request, 20).tokens
    again = prompt_of(3, request, 25).tokens
    assert again[:20].tolist() == first.tolist()
    assert prompt_of(4, request, 20).tokens[12:].tolist() != first[12:].tolist()


def test_a_made_up_trace_without_end_is_refused() -> None:
    with pytest.raises(TraceError, match="1000000000000000000 requests"):
        synthetic("chat", num_requests=10**18, rate=1.0, seed=0)


def test_mooncakes_lines_are_read_and_equal_ids_are_equal_tokens(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 27000, "input_length": 1300, "output_length": 52, "hash_ids": [4, 5, 6]}\n'
        '{"timestamp": 30500, "input_length": 1024, "output_length": 0, "hash_ids": [4, 5]}\n'
        '{"timestamp": 30500, "input_length": 600, "output_length": 9, "hash_ids": [4, 9]}\n'
    )
    first, second, third = read_trace(path)
    assert (first.arrival, second.arrival, third.arrival) == (0.0, 3.5, 3.5)
    assert (first.prompt_tokens, first.output_tokens) == (1300, 52)
    assert first.prefixes == (("mooncake-4", 512), ("mooncake-5", 512), ("mooncake-6", 276))
    assert second.output_tokens == 1  # an answer has one token at least
    same = [prompt_of(i, r, r.prompt_tokens).tokens for i, r in enumerate((first, second, third))]
    assert (same[0][:1024] == same[1]).all()
    assert (same[0][:512] == same[2][:512]).all()
    assert not (same[0][512:600] == same[2][512:]).all()


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_azures_table_is_read_with_its_seven_digits_of_a_second(tmp_path, zone):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        f"2023-11-16 18:15:46.5000000{zone},374,44\r\n"
        f"2023-11-16 18:17:03.2500000{zone},396,109\r\n"
    )
    first, second = read_trace(path)
    assert (first.arrival, second.arrival) == (0.0, 76.75)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)
    assert second.prefixes == ()


@pytest.mark.parametrize(
    "line", ["yesterday,1,2", "2023-11-16 18:15:46,1", "2023-11-16 18:15:46,1,many"]
)
def test_a_broken_line_of_azures_table_is_named(tmp_path, line):
    path = tmp_path / "azure.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{line}\n")
    with pytest.raises(TraceError, match=r"azure\.csv:2: "):
        read_trace(path)
