"""The demo itself: real processes, real weights, rows over NIXL, faults."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstow.demo.weights import GEMMA3, WeightsMissing
from waiting import wait_for

PROMPTS = ["One short question?", "A longer one, " * 12 + "with an end?"]
SECONDS = 280
COMMAND = (sys.executable, "-m", "kvstow", "demo")


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return subprocess.run(
        [*COMMAND, "--new-tokens", "12", *prompts, *options],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def report(*options: str) -> dict:
    run = demo("--json", *options)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def assert_identical(facts: dict, *transfers: int) -> None:
    assert facts["identical"] is True
    assert all(prompt["identical"] for prompt in facts["prompts"])
    assert len(facts["transfers"]) in transfers
    for transfer in facts["transfers"]:
        assert (transfer["fence"], transfer["digest"]) == ("passed", "passed")
        assert transfer["bytes"] > 0


def first_children(run: subprocess.Popen[str]) -> list[int]:
    task = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    give_up = time.monotonic() + SECONDS
    while not (children := task.read_text().split()) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert children
    return [int(child) for child in children]


def wait_for_the_end_of(children: list[int]) -> None:
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children), SECONDS)


@pytest.mark.parametrize(
    ("options", "transfers"),
    [
        (["--kill-prefill"], (1, 2)),  # mapped rows of a killed process may still be copied
        (["--block-tokens-decode", "64", "--order-decode", "LBHNC"], (2,)),
        pytest.param(
            ["--block-tokens", "8", "--order", "LBHNC", "--memory", "64MiB"],
            (2,),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_default_model_gives_the_text_of_a_single_process(options, transfers):
    facts = report(*options)
    assert_identical(facts, *transfers)
    assert facts["model"] == "smollm2-135m-instruct"
    fallbacks = sum(len(prompt["fallback"]) for prompt in facts["prompts"])
    assert fallbacks + len(facts["transfers"]) == 2


def test_a_fresh_process_answers_with_the_default_model_from_the_rows_on_disk(tmp_path):
    facts = report("--offload", str(tmp_path / "store"))
    assert_identical(facts, 2)
    assert all("reloaded" in prompt["to_first_token"] for prompt in facts["prompts"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_weights_with_a_sliding_window_give_the_text_of_a_single_process():
    try:
        GEMMA3.paths()
    except WeightsMissing as missing:
        pytest.skip(str(missing))
    long = "The lighthouse keeper wrote: the sea was calm. " * 60  # longer than the window of 512
    facts = report("--model", "gemma3-270m", "--prompt", long, "--memory", "512MiB")
    assert facts["identical"] is True
    assert max(prompt["prompt_tokens"] for prompt in facts["prompts"]) > 512


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3_next", "mamba2"])
def test_hybrid_models_hand_over_windows_and_states(family):
    assert_identical(report("--model", f"random:{family}", "--block-tokens-decode", "8"), 2)


def test_a_fresh_process_answers_from_the_rows_on_disk(tmp_path):
    facts = report("--model", "random:falcon_h1", "--offload", str(tmp_path / "store"))
    assert_identical(facts, 2)
    assert all("reloaded" in prompt["to_first_token"] for prompt in facts["prompts"])


@pytest.mark.slow
def test_a_killed_prefill_process_costs_time_but_not_the_text():
    facts = report("--model", "random:jamba", "--kill-prefill")
    assert_identical(facts, 1, 2)
    fallbacks = facts["prompts"][1]["fallback"]
    assert len(facts["transfers"]) + len(fallbacks) == 2
    assert all("did not answer" in fallback for fallback in fallbacks)


def test_the_report_shows_plan_text_transfers_and_verdict():
    run = demo("--model", "random:mistral")
    assert run.returncode == 0, run.stderr
    assert "prefill: ready" in run.stderr
    for part in (
        "window24",
        "8,192",
        "order BLHNC",
        "descr.",
        "recomputed",
        "passed",
        "tokens identical",
        "2 transfers, ",
        "identical: every token is the single process's",
    ):
        assert part in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 80


def test_an_interrupted_demo_leaves_no_process_behind():
    run = subprocess.Popen(
        [*COMMAND, "--model", "random:llama"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in background
    )
    children = first_children(run)
    run.send_signal(signal.SIGINT)
    _, talk = run.communicate(timeout=SECONDS)
    assert run.returncode == 130
    assert "all processes of the demo have ended" in talk
    wait_for_the_end_of(children)


def test_children_of_a_killed_parent_end_by_themselves():
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = subprocess.Popen([*COMMAND, "--model", "random:llama"], text=True, **quiet)
    children = first_children(run)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_for_the_end_of(children)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--model", "no-such-model"], 2, "no model 'no-such-model'"),
        pytest.param(
            ["--model", "random:llama", "--memory", "1000"],
            1,
            "a budget of 1,000 bytes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_reason(options, code, message):
    run = demo(*options)
    assert run.returncode == code
    assert message in run.stderr
    assert "Traceback" not in run.stderr
