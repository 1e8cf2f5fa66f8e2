"""The demo itself: real processes, real weights, rows over NIXL, faults."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvstow.demo.messages import Done, Pulled
from kvstow.demo.packaged import GEMMA3, SMOLLM2, WeightsMissing
from kvstow.demo.screen import Screen
from kvstow.demo.story import DemoOptions, DemoState, PromptState
from waiting import wait_for

PROMPTS = ["One short question?", "A longer one, " * 12 + "with an end?"]
SECONDS = 280


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    asked = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return subprocess.run(
        [sys.executable, "-m", "kvstow", "demo", "--new-tokens", "12", *asked, *options],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def report(*options: str) -> dict:
    run = demo("--json", *options)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def assert_identical(found: dict, transfers: int) -> None:
    assert found["identical"] is True
    assert [prompt["identical"] for prompt in found["prompts"]] == [True] * len(PROMPTS)
    assert len(found["transfers"]) == transfers
    for transfer in found["transfers"]:
        assert (transfer["fence"], transfer["digest"]) == ("passed", "passed")
        assert transfer["bytes"] > 0


def children_of(pid: int) -> list[int]:
    task = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in task.read_text().split()] if task.exists() else []


@pytest.fixture(scope="module")
def real_weights() -> str:
    try:
        SMOLLM2.paths()
    except WeightsMissing as missing:
        pytest.fail(str(missing))
    return "smollm2"


def test_real_weights_give_the_text_of_a_single_process_across_blocks_and_orders(real_weights):
    options = ["--model", real_weights, "--block-tokens-decode", "64", "--order-decode", "BLNHC"]
    found = report(*options, "--kill-prefill")
    assert_identical(found, transfers=1)
    assert found["model"] == "smollm2-135m-instruct"
    assert [len(prompt["fallback"]) for prompt in found["prompts"]] == [0, 1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_weights_with_a_sliding_window_give_the_text_of_a_single_process():
    try:
        GEMMA3.paths()
    except WeightsMissing as missing:
        pytest.skip(str(missing))
    long = "The lighthouse keeper wrote: the sea was calm. " * 60  # longer than the window of 512
    found = report("--model", "gemma3-270m", "--prompt", long, "--memory", "512MiB")
    assert found["identical"] is True
    assert max(prompt["prompt_tokens"] for prompt in found["prompts"]) > 512


@pytest.mark.slow
def test_rows_cost_far_fewer_descriptors_than_layers():
    found = report("--model", "random:llama")
    assert_identical(found, transfers=2)
    assert (
        sum(x["descriptors"] for x in found["transfers"]) * 8 <= found["per_layer"]["descriptors"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3_next", "mamba2"])
def test_hybrid_models_hand_over_windows_and_states(family):
    assert_identical(report("--model", f"random:{family}", "--block-tokens-decode", "8"), 2)


def test_a_fresh_process_answers_from_the_rows_on_disk(tmp_path):
    found = report("--model", "random:falcon_h1", "--offload", str(tmp_path / "store"))
    assert_identical(found, transfers=2)
    assert all("reloaded" in prompt["to_first_token"] for prompt in found["prompts"])


@pytest.mark.slow
def test_a_killed_prefill_process_costs_time_but_not_the_text():
    found = report("--model", "random:jamba", "--kill-prefill")
    assert_identical(found, transfers=1)
    (fallback,) = found["prompts"][1]["fallback"]
    assert "nothing in these blocks may be used" in fallback


def test_the_screen_shows_plan_text_transfers_and_verdict():
    run = demo("--model", "random:mistral")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    for part in (
        "window24",
        "8,192",
        "order BLHNC",
        "descr.",
        "recom-",
        "passed",
        "tokens identical",
        "identical: every token is the single process's",
    ):
        assert part in run.stdout
    tables = [line for line in run.stdout.splitlines() if "both" in line or "passed" in line]
    assert len(tables) == 3
    assert not any("…" in line for line in tables)


def test_one_of_each_is_counted_as_one():
    pull = Pulled(
        nbytes=1,
        descriptors=1,
        regions=1,
        seconds=1.0,
        rows=1,
        per_layer=2,
        fence="passed",
        digest="passed",
        direction="read",
    )
    show = DemoState.of(DemoOptions(prompts=("a",)))
    done = Done(tokens=(1,), to_first=1.0)
    show.prompts = [PromptState("a", streamed="b", pulled=pull, decoded=done, judged=done)]
    console = Console(width=200)
    with console.capture() as capture:
        Screen(console).finish(show)
    assert "1 transfer, 1 B in 1 descriptor;" in capture.get()


def test_an_interrupted_demo_leaves_no_process_behind():
    run = subprocess.Popen(
        [sys.executable, "-m", "kvstow", "demo", "--model", "random:llama"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in background
    )
    children: list[int] = []
    give_up = time.monotonic() + SECONDS
    while not children and time.monotonic() < give_up:
        children = children_of(run.pid)
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=SECONDS)
    assert run.returncode == 130
    assert "all processes of the demo have ended" in said
    assert children
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--model", "no-such-model"], 2, "no model 'no-such-model'"),
        pytest.param(
            ["--model", "random:llama", "--memory", "1000"],
            1,
            "a budget of 1000 bytes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_reason(options, code, said):
    run = demo(*options)
    assert run.returncode == code
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def test_children_of_a_killed_parent_end_by_themselves():
    run = subprocess.Popen(
        [sys.executable, "-m", "kvstow", "demo", "--model", "random:llama"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    give_up = time.monotonic() + SECONDS
    children: list[int] = []
    while not children and time.monotonic() < give_up:
        children = children_of(run.pid)
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < give_up
        time.sleep(0.1)
