"""`kvstow size`: how many requests fit, what a load needs, the smallest cluster."""

import json

import pytest
from typer.testing import CliRunner, Result

from kvstow.cli import app


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["size", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def size(*arguments: str, code: int = 0) -> dict:
    result = invoke(*arguments, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def test_a_gpu_alone_asks_how_many_requests_fit():
    document = size("llama-3.1-8b", "--gpu", "h100", "--tokens", "4096", "--dp", "2")
    assert document["question"] == "fit"
    assert document["gpus"] == 2
    assert document["max_requests"] == 2 * document["ranks"][0]["requests"] > 0
    assert document["answer"].startswith(f"{document['max_requests']} requests of 4,096 tokens fit")


def test_every_rank_is_shown_and_the_limiting_one_is_named():
    document = size("llama-3.1-8b", "--gpu", "l40s", "--pp", "5", "--tp", "2")
    assert [rank["rank"] for rank in document["ranks"]] == list(range(10))
    assert [rank["layers"] for rank in document["ranks"]] == [6] * 4 + [7] * 4 + [6] * 2
    assert document["limiting_rank"] == 4
    assert document["max_requests"] == document["ranks"][4]["requests"]
    text = invoke("llama-3.1-8b", "--gpu", "l40s", "--pp", "5", "--tp", "2").stdout
    assert "rank 4 is the limit" in text
    assert "4–5" in text


def test_requests_alone_ask_how_much_memory_they_need():
    document = size("llama-3.1-8b", "--requests", "100", "--weights-bytes", "16GB")
    assert document["question"] == "memory"
    rows = 100 * 512 + 1  # and the slab that is nobody's
    assert document["ranks"][0]["cache_bytes"] == rows * 2 * 2**20
    assert document["bytes_per_gpu"] == rows * 2 * 2**20 + 16 * 10**9


def test_both_ask_for_the_smallest_cluster():
    document = size("llama-3.1-70b", "--gpu", "h200", "--requests", "200", "--kv-dtype", "bf16,fp8")
    assert document["question"] == "cluster"
    best, *others = document["clusters"]
    assert best["max_requests"] >= 200
    assert all(each["gpus"] >= best["gpus"] for each in others)
    assert {each["kv_dtype"] for each in document["clusters"]} == {"bf16", "fp8"}
    fixed = size("llama-3.1-70b", "--gpu", "h200", "--requests", "200", "--tp", "8", "--pp", "1")
    assert {(each["tp"], each["pp"]) for each in fixed["clusters"]} == {(8, 1)}


def test_heads_that_are_repeated_are_said():
    assert "on 2 of the 16" in invoke("llama-3.1-8b", "--gpu", "h100", "--tp", "16").stdout
    assert "tensor-parallel ranks:" not in invoke("llama-3.1-8b", "--gpu", "h100").stdout


def test_a_model_that_does_not_fit_ends_with_1_and_says_what_would_do():
    document = size("llama-3.1-70b", "--gpu", "h100", code=1)
    assert document["max_requests"] == 0
    assert "2 × h100 (tp 2" in document["answer"]
    assert size("llama-3.1-405b", "--gpu", "1GiB", "--requests", "3", code=1)["clusters"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["llama-3.1-8b"],
        ["llama-3.1-8b", "--gpu", "h100", "--pp", "4"],
        ["deepseek-v3", "--gpu", "h200", "--requests", "500"],
        ["jamba-mini", "--gpu", "80GiB", "--tp", "2"],
        ["llama-3.1-70b", "--gpu", "h100"],
    ],
)
def test_answers_fit_80_columns(arguments):
    text = invoke(*arguments).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\n\n") >= 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["gpt4"], 2, ["gpt-oss-20b"]),
        (["llama-3.1-8b", "--gpu", "h10"], 2, ["'h10'", "h100", "hint:"]),
        (["llama-3.1-8b", "--gpu", "80"], 2, ["80 bytes", "'80'", "hint:", "80GiB"]),
        (["llama-3.1-8b", "--gpu", "h100", "--kv-dtype", "fp8,bf16"], 2, ["fp8,bf16", "hint:"]),
        (["llama-3.1-8b", "--requests", "4", "--kv-dtype", "fp8,bf16"], 2, ["fp8,bf16", "hint:"]),
        (["llama-3.1-8b", "--kv-dtype", "fp9"], 2, ["fp9", "hint:"]),
        (["llama-3.1-8b", "--tp", "3", "--gpu", "h100"], 1, ["32", "3", "hint:"]),
        (["glm-4.7-flash", "--gpu", "h100"], 2, ["--weights-bytes"]),
        (["llama-3.1-8b", "--utilisation", "1.5"], 2, ["--utilisation"]),
        (["llama-3.1-8b", "--requests", "0"], 2, ["--requests"]),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_reason(arguments, code, words):
    result = invoke(*arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert all(word in result.stderr for word in words)


@pytest.mark.parametrize(("model", "gpu"), [("mamba2-2.7b", "h100"), ("qwen3-next-80b", "h200")])
def test_recurrent_layers_have_no_kv_heads_to_repeat(model, gpu):
    arguments = (model, "--gpu", gpu, "--tp", "2")
    assert size(*arguments)["head_copies"] == 1
    assert "Every kv head" not in invoke(*arguments).stdout


def test_a_request_longer_than_the_model_is_published_for_is_noted():
    result = invoke("llama-3.1-8b", "--gpu", "h200", "--tokens", "200000")
    assert "131,072 tokens at most; counted with 200,000" in result.stderr
    assert invoke("llama-3.1-8b", "--gpu", "h200", "--tokens", "131072").stderr == ""
