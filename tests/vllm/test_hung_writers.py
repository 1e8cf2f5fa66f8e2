"""Prefill hangs while it writes into decode's blocks: decode goes on, in others.

The prefill process stops itself when it has written half of what decode waits for
(`plugins/stopped_writes.py`), and writes the rest when it goes on. Decode has few blocks, and would
give those away at once.
"""

import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Launch, Server, running

from waiting import has_stopped, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE / "plugins"), str(HERE.parents[1] / "src")])
BLOCK = 32
NUM_BLOCKS = 60
"""Of them 59 for requests, of at most 32 blocks each."""

LENGTH = 20 * BLOCK - 5
TRANSFER_SECONDS = 20


@pytest.fixture(scope="module")
def stops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, prefill stops when it writes."""
    return tmp_path_factory.mktemp("stops") / "now"


@pytest.fixture(scope="module")
def pair(smollm2: Path, logs: Path, stops: Path) -> Iterator[list[Server]]:
    launches = [
        Launch(
            model=smollm2,
            name="smollm2",
            settings={
                "digest": "always",
                "direction": "write",
                "lease_seconds": 300,
                "transfer_seconds": TRANSFER_SECONDS,
                "contact_seconds": TRANSFER_SECONDS,
            },
            environment={"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", **more},
            options=("--block-size", f"{BLOCK}", "--num-gpu-blocks-override", f"{NUM_BLOCKS}"),
        )
        for more in ({"KVSTOW_STOPPED_WRITES": str(stops), "PYTHONPATH": PATH}, {})
    ]
    with running(*launches, logs=logs) as servers:
        yield servers


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 40_000, count).tolist()


@contextmanager
def hung(
    pair: list[Server], stops: Path, prompt: list[int], patience: float = 600
) -> Iterator[Future[str]]:
    """Decode is asked to continue, and prefill hangs in the middle of the write. It goes on when
    the block is left."""
    prefill, decode = pair
    params = prefill.tickets(prompt)
    stopped: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        stops.touch()
        try:
            answer = pool.submit(
                decode.text, prompt, max_tokens=8, patience=patience, kv_transfer_params=params
            )
            wait_for(lambda: any(has_stopped(pid) for pid in prefill.worker_pids()))
            stopped += [pid for pid in prefill.worker_pids() if has_stopped(pid)]
            stops.unlink()
            yield answer
        finally:
            stops.unlink(missing_ok=True)
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def gauge(server: Server, name: str) -> float:
    """One of vLLM's own."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(s.value for family in families for s in family.samples if s.name == name)


def texts(server: Server, prompts: list[list[int]], max_tokens: int) -> list[str]:
    """Answers to all of them at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: server.text(p, max_tokens=max_tokens), prompts))


def test_decode_computes_the_prompt_in_other_blocks(pair: list[Server], stops: Path):
    prefill, decode = pair
    prompt = tokens(LENGTH, seed=1)
    meanwhile = [tokens(200 + 40 * k, seed=10 + k) for k in range(6)]
    expected, others = prefill.text(prompt, max_tokens=8), texts(prefill, meanwhile, 8)
    handed_over(pair, seed=2)
    before = decode.counts()
    with hung(pair, stops, prompt) as answer:
        assert answer.result() == expected
        held = before.get("held blocks", 0) + 20
        assert decode.await_count("held blocks", held) == held
        assert texts(decode, meanwhile, 8) == others
        assert any(has_stopped(pid) for pid in prefill.worker_pids())
        assert decode.counts().get("released blocks", 0) == before.get("released blocks", 0)
    assert decode.await_count("released blocks", held) == held
    faults = ("pull timeout", "pull peer")
    assert sum(decode.counts().get(kind, 0) - before.get(kind, 0) for kind in faults) == 1
    wait_for(lambda: gauge(decode, "vllm:kv_cache_usage_perc") == 0)
    handed_over(pair, seed=3)


def handed_over(pair: list[Server], seed: int) -> None:
    """A hand-over works."""
    prefill, decode = pair
    prompt = tokens(LENGTH, seed)
    accepted = decode.counts().get("pull accepted", 0) + 1
    expected = prefill.text(prompt, max_tokens=8)
    params = prefill.tickets(prompt)
    assert decode.text(prompt, max_tokens=8, kv_transfer_params=params) == expected
    assert decode.await_count("pull accepted", accepted) == accepted


def test_late_bytes_change_no_text(pair: list[Server], stops: Path):
    """The client has left, so the blocks that prefill writes to would be the next to be given."""
    prefill, decode = pair
    prompts = [tokens(250 + 60 * k, seed=20 + k) for k in range(3)]
    expected = texts(prefill, prompts, 100)
    before = decode.counts()
    with ThreadPoolExecutor(1) as pool:
        with hung(pair, stops, tokens(LENGTH, seed=4), patience=3) as answer:
            with pytest.raises(TimeoutError):
                answer.result()
            held = before.get("held blocks", 0) + 20
            assert decode.await_count("held blocks", held) == held
            assert gauge(decode, "vllm:kv_cache_usage_perc") == pytest.approx(20 / (NUM_BLOCKS - 1))
            running = pool.submit(texts, decode, prompts, 100)
            wait_for(lambda: gauge(decode, "vllm:num_requests_running") == len(prompts))
            assert decode.counts().get("released blocks", 0) == before.get("released blocks", 0)
        assert running.result() == expected
    assert decode.await_count("released blocks", held) == held
    wait_for(lambda: gauge(decode, "vllm:kv_cache_usage_perc") == 0)
    handed_over(pair, seed=5)


def test_a_prefill_that_dies_while_it_writes_is_not_waited_for(pair: list[Server], stops: Path):
    """Its blocks come back when decode's transfer engine was replaced."""
    prefill, decode = pair
    prompt = tokens(LENGTH, seed=6)
    expected = prefill.text(prompt, max_tokens=8)
    held = decode.counts()["held blocks"] + 20
    with hung(pair, stops, prompt) as answer:
        prefill.kill()
        assert answer.result() == expected
        assert decode.await_count("held blocks", held) == held
    assert decode.await_count("released blocks", held) == held
    wait_for(lambda: gauge(decode, "vllm:kv_cache_usage_perc") == 0)
