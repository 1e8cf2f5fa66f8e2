"""The router in front of real servers: tickets carried, streams, retries, plain decode."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving import Launch, Server, free_port, running

from waiting import stop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PROMPT = "The quick brown fox jumps over the lazy dog. " * 30 + "The capital of France is"


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, smollm2: Path, logs: Path) -> Iterator[list[Server]]:
    """Prefill and decode; the parameter is what decode does about loads that fail."""
    launch = Launch(model=smollm2, name="smollm2", settings={"digest": "always"})
    policy = getattr(request, "param", "recompute")
    decode = replace(launch, transfer={"kv_load_failure_policy": policy})
    with running(launch, decode, logs=logs) as servers:
        yield servers


@contextmanager
def router(logs: Path, prefill: list[str], decode: list[str]) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "kvstow", "route-requests", "--port", str(port)]
    for url in prefill:
        command += ["--prefill", url]
    for url in decode:
        command += ["--decode", url]
    with (logs / f"router-{port}.log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        await_health(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def await_health(url: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(url + "/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the router does not answer")


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read()


def body(**more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}


def counts(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.split('"')[1]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(("kvstow_router_requests_total", "kvstow_router_faults_total"))
    }


def test_a_request_is_prefilled_there_and_decoded_here(pair: list[Server], logs: Path):
    prefill, decode = pair
    expected = prefill.text(PROMPT, max_tokens=12)
    before = decode.counts().get("pulls accepted", 0)
    with router(logs, [prefill.url], [decode.url]) as url:
        answer = json.loads(post(url + "/v1/completions", body()))
        assert counts(url) == {"tickets": 1.0}
    assert answer["choices"][0]["text"] == expected
    assert decode.await_count("pulls accepted", before + 1) == before + 1


def test_a_stream_comes_in_pieces_that_make_the_same_text(pair: list[Server], logs: Path):
    prefill, decode = pair
    expected = prefill.text(PROMPT, max_tokens=12)
    with router(logs, [prefill.url], [decode.url]) as url:
        lines = post(url + "/v1/completions", body(stream=True)).decode().splitlines()
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(pieces) > 3
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"


def test_chats_are_carried_too(pair: list[Server], logs: Path):
    prefill, decode = pair
    chat = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 8,
        "temperature": 0,
    }
    expected = prefill.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    with router(logs, [prefill.url], [decode.url]) as url:
        answer = json.loads(post(url + "/v1/chat/completions", chat))
    assert answer["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("pair", ["fail"], indirect=True, ids=["the policy is vLLM's own"])
@pytest.mark.parametrize(
    ("prompts", "choices"),
    [({"n": 2, "temperature": 0.8, "seed": 3}, 2), ({"prompt": [PROMPT, "One. " * 100]}, 2),
     ({"prompt": [PROMPT, PROMPT, "Hello"], "n": 2, "temperature": 0.8}, 6)],
    ids=["n", "prompts", "both"],
)  # fmt: skip
def test_a_request_that_becomes_several_of_the_engine_s_is_served(
    pair: list[Server], logs: Path, prompts: dict[str, Any], choices: int
):
    """They share a ticket, or have none: no load fails, which vLLM would answer with an error."""
    prefill, decode = pair
    with router(logs, [prefill.url], [decode.url]) as url:
        for _ in range(3):
            answer = json.loads(post(url + "/v1/completions", body(**prompts)))
            assert [choice["index"] for choice in answer["choices"]] == [*range(choices)]
            assert {choice["finish_reason"] for choice in answer["choices"]} <= {"length", "stop"}
        chat = {"messages": [{"role": "user", "content": "Say hello."}], "n": 3, "max_tokens": 8}
        answer = json.loads(post(url + "/v1/chat/completions", {"model": "smollm2", **chat}))
        assert len(answer["choices"]) == 3
        assert "prefill" not in counts(url)  # nobody was rested for it


def test_a_dead_prefill_instance_is_passed_over(pair: list[Server], logs: Path):
    prefill, decode = pair
    expected = prefill.text(PROMPT, max_tokens=12)
    dead = f"http://127.0.0.1:{free_port()}"
    with router(logs, [dead, prefill.url], [decode.url]) as url:
        answer = json.loads(post(url + "/v1/completions", body()))
        assert counts(url) == {"prefill": 1.0, "tickets": 1.0}
    assert answer["choices"][0]["text"] == expected


def test_without_any_prefill_instance_decode_does_it_all(pair: list[Server], logs: Path):
    prefill, decode = pair
    expected = prefill.text(PROMPT, max_tokens=12)
    dead = f"http://127.0.0.1:{free_port()}"
    with router(logs, [dead], [decode.url]) as url:
        answer = json.loads(post(url + "/v1/completions", body()))
        assert counts(url) == {"prefill": 1.0, "plain": 1.0}
    assert answer["choices"][0]["text"] == expected


def test_a_stopped_prefill_instance_costs_one_request_a_moment_and_the_next_ones_nothing(
    pair: list[Server], logs: Path
):
    """The kernel accepts connections for a stopped process, and nobody answers them."""
    prefill, decode = pair
    expected = prefill.text(PROMPT, max_tokens=12)
    stopped = prefill.worker_pids()
    with router(logs, [prefill.url], [decode.url]) as url:
        for pid in stopped:
            stop(pid)
        try:
            answers = [json.loads(post(url + "/v1/completions", body())) for _ in range(4)]
            assert counts(url) == {"prefill": 1.0, "plain": 4.0}
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert {answer["choices"][0]["text"] for answer in answers} == {expected}
        until = time.monotonic() + 120
        while "tickets" not in counts(url):  # it is healthy again, and found to be so
            assert time.monotonic() < until
            post(url + "/v1/completions", body())
            time.sleep(1)
    assert prefill.text(PROMPT, max_tokens=12) == expected
