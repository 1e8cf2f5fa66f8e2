"""Two engines that take prefixes from each other's host memory, and `kvstow why` of one of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Launch, Server, free_port, running

from waiting import stop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BLOCK = 128
ROW = 30 * 3 * 128 * 128 * 4
"""Bytes of a block of 128 tokens of SmolLM2-135M in float32."""


def prompt(seed: int, count: int = 4 * BLOCK + 40) -> list[int]:
    return np.random.default_rng(1000 + seed).integers(100, 40_000, count).tolist()


def forked(seed: int, tail: int) -> list[int]:
    """A prompt with the first four blocks of another one."""
    return prompt(seed)[: 4 * BLOCK] + prompt(tail, 60)


class Pair:
    """Two servers, each of which lends to and asks the other."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.stores = [folder / "a", folder / "b"]
        lend = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.launches = [
            Launch(
                model=model,
                name="smollm2",
                settings={
                    "host_bytes": 12 * ROW,
                    "disk_path": str(self.stores[i]),
                    "disk_bytes": 1 << 30,
                    "journal": "tokens",
                    "lend": lend[i],
                    "peers": [lend[1 - i]],
                    "peers_seconds": 10.0,
                    "peers_pull_seconds": 60.0,
                    "contact_seconds": 60.0,
                },
                environment={"VLLM_LOGGING_LEVEL": "DEBUG"},
            )
            for i in range(2)
        ]
        self.lend = lend
        self.servers: list[Server] = []


@pytest.fixture(scope="module")
def pair(smollm2: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(smollm2, tmp_path_factory.mktemp("stores"))
    with running(*made.launches, logs=logs) as servers:
        made.servers = servers
        until(lambda: all(are_met(address) for address in made.lend))
        yield made


def are_met(address: str) -> bool:
    """Whether the other engine has said hello to the agent that lends here."""
    (document,) = json.loads(kvstow("status", address, "--json"))
    return len(document["guests"]) == 1


def until(is_so: Callable[[], bool], seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit, "it never came to be"
        time.sleep(0.2)


# ── asking ────────────────────────────────────────────────────────────────────────────────


def test_a_prefix_that_another_engine_has_computed_is_pulled_and_the_text_is_equal(pair: Pair):
    a, b = pair.servers
    expected = a.text(prompt(1), max_tokens=12)
    assert a.await_count("stored_rows", 4) >= 4
    assert b.text(prompt(1), max_tokens=12) == expected
    assert b.await_count("pulls accepted") == 1
    found = b.counts()
    assert (found["peer_tickets"], found["pulled_tokens"]) == (1, 4 * BLOCK)
    assert found.get("restored_tokens", 0) == 0
    assert a.text(forked(1, 50), max_tokens=12) == b.text(forked(1, 50), max_tokens=12)


def test_an_engine_answers_while_its_peer_hangs(pair: Pair):
    a, b = pair.servers
    before = b.counts().get("peer_tickets", 0)
    try:
        for pid in a.worker_pids():
            stop(pid)
        texts = [b.text(prompt(seed), max_tokens=12) for seed in (2, 3)]
    finally:
        for pid in a.worker_pids():
            os.kill(pid, signal.SIGCONT)
    assert b.counts().get("peer_tickets", 0) == before
    assert [a.text(prompt(seed), max_tokens=12) for seed in (2, 3)] == texts


def test_kvstow_status_shows_what_an_engine_lends(pair: Pair):
    a, _ = pair.servers
    said = kvstow("status", pair.lend[0], "--json")
    (document,) = json.loads(said)
    assert document["lent_blocks"] >= 4
    assert document["answers"]["ticket"] >= 1
    assert "smollm2" in document["model"].lower()
    assert a.process.poll() is None


def kvstow(*arguments: str) -> str:
    command = [sys.executable, "-m", "kvstow", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ── why ───────────────────────────────────────────────────────────────────────────────────


def test_kvstow_why_explains_what_a_running_engine_has_served(pair: Pair):
    a, _ = pair.servers
    a.text(prompt(4), max_tokens=2)
    a.await_count("stored_rows", 8)

    def why(tokens: list[int], *more: str) -> dict[str, Any]:
        place = str(pair.stores[0])
        return json.loads(kvstow("why", place, "--tokens", json.dumps(tokens), "--json", *more))

    until(lambda: why(prompt(4))["found_tokens"] == 4 * BLOCK)
    assert why(prompt(4))["reason"] == "found"
    assert why(prompt(4), "--model", str(pair.launches[0].model))["reason"] == "found"
    changed = prompt(4)
    changed[3 * BLOCK + 5] += 1
    found = why(changed)
    assert (found["reason"], found["found_tokens"]) == ("differs", 3 * BLOCK)
    assert (found["token"], found["asked_token"]) == (3 * BLOCK + 5, changed[3 * BLOCK + 5])
    assert why(prompt(4), "--salt", "me")["reason"] == "salt"
    assert why(prompt(99, 300))["reason"] == "differs"
    a.text(changed, max_tokens=2)
    line = re.compile(r"tokens are found: differs: token 389 is \d+, and \d+ in the prompt stored")
    until(lambda: line.search(a.log.read_text(errors="replace")) is not None)
