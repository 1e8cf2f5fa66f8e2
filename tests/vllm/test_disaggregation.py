"""Prefill in one vLLM, decode in another: real weights, real faults, the text of one vLLM.

One pair of servers serves the whole file; the last tests leave the prefill server dead.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Launch, Server, free_port, running, shows
from typer.testing import CliRunner

import recorded_vllm
from kvstow.adapters.vllm.cache.layout import declared_layout
from kvstow.cli import app
from kvstow.plan import manifest
from kvstow.transfer.tickets.ticket import Ticket
from waiting import stop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LEASE_SECONDS = 30
BLOCK = 128
ROW = 30 * 3 * BLOCK * 2 * 64 * 4
"""SmolLM2: layers, kv heads, tokens, K and V, head dim, bytes."""

SENTENCE = "The quick brown fox jumps over the lazy dog near the river bank. "
SHORT = "The capital of France is"


@pytest.fixture(scope="module")
def launches(smollm2: Path, logs: Path) -> list[Launch]:
    """A prefill and a decode server over TCP, every byte's digest compared. Decode reads;
    prefill writes in `test_hung_writers`."""
    settings = {
        "digest": "always",
        "direction": "read",
        "lease_seconds": LEASE_SECONDS,
        "transfer_seconds": 120,
        "manifest_file": str(logs / "manifest"),
    }
    return [
        Launch(
            model=smollm2,
            name="smollm2",
            settings={**settings, "listen": f"tcp://127.0.0.1:{free_port()}"},
            environment={"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"},
        )
        for _ in ("prefill", "decode")
    ]


@pytest.fixture(scope="module")
def pair(launches: list[Launch], logs: Path) -> Iterator[list[Server]]:
    with running(*launches, logs=logs) as servers:
        yield servers


@pytest.fixture(scope="module")
def left() -> dict[str, Any]:
    """Tickets that a server left behind when it died."""
    return {}


def tokens(count: int, seed: int) -> list[int]:
    """A prompt of exactly so many tokens: words of the model's vocabulary, at random."""
    return np.random.default_rng(seed).integers(100, 40_000, count).tolist()


def handed_over(pair: list[Server], prompt: str | list[int], max_tokens: int = 12) -> str:
    prefill, decode = pair
    params = prefill.tickets(prompt)
    return decode.text(prompt, max_tokens=max_tokens, kv_transfer_params=params)


def alone(pair: list[Server], prompt: str | list[int], max_tokens: int = 12) -> str:
    """What the prefill server answers on its own."""
    return pair[0].text(prompt, max_tokens=max_tokens)


def test_the_engine_declares_what_was_recorded(pair: list[Server], logs: Path):
    layout = manifest.decode((logs / "manifest.0-0").read_bytes())
    recorded = declared_layout(recorded_vllm.smollm2("BLHNC"), base_align=64)
    assert layout.identity is not None
    assert layout.identity.interior == "cpu-transposed"
    assert layout.identity.is_verified
    assert replace(layout, model=recorded.model, identity=recorded.identity) == recorded


# ── it works ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 77])
def test_decode_continues_as_one_server_would(pair: list[Server], count: int):
    prompt = tokens(count, seed=count)
    before = pair[1].counts().get("pulled_tokens", 0)
    assert handed_over(pair, prompt) == alone(pair, prompt)
    pulled = before + count - 1  # the last token is computed
    assert pair[1].await_count("pulled_tokens", pulled) == pulled
    shows("full attention", "hand-over")


def test_status_shows_workers_by_their_agents_and_servers_by_their_metrics(pair: list[Server]):
    before = pair[1].counts().get("pulled_tokens", 0)
    handed_over(pair, tokens(2 * BLOCK, seed=2))
    pair[1].await_count("pulled_tokens", before + 2 * BLOCK - 1)
    nbytes = pair[1].counts()["pulled_bytes"]
    agents = [re.findall(r"kvstow: .* agent (\S+) at (\S+)", each.tail(10_000))[0] for each in pair]
    addresses = [*(address for _, address in agents), f"{pair[1].url}/metrics"]
    done = CliRunner().invoke(app, ["status", *addresses, "--json"])
    prefill, decode, server = json.loads(done.stdout)
    assert [prefill["agent"], decode["agent"]] == [name for name, _ in agents]

    def total(process: dict[str, Any], name: str) -> float:
        return sum(n for key, n in process["metrics"].items() if key.partition("{")[0] == name)

    assert total(prefill, "kvstow_transfer_served_bytes_total") == nbytes
    assert total(decode, "kvstow_transfer_bytes_total") == nbytes
    assert total(server, "kvstow_vllm_pulled_bytes_total") == nbytes


def test_a_block_is_one_row_and_never_more_descriptors(pair: list[Server]):
    decode = pair[1]
    before = decode.counts()
    prompt = tokens(6 * BLOCK - 3, seed=601)
    handed_over(pair, prompt, max_tokens=1)
    decode.await_count("pulled_bytes", before["pulled_bytes"] + 6 * ROW)
    after = decode.counts()
    assert after["pulled_bytes"] - before["pulled_bytes"] == 6 * ROW
    assert 1 <= after["pull_descriptors"] - before["pull_descriptors"] <= 6


def test_a_prefix_that_decode_has_is_not_pulled_again(pair: list[Server]):
    decode = pair[1]
    shared = tokens(2 * BLOCK, seed=7)
    first, second = shared + tokens(40, seed=8), shared + tokens(50, seed=9)
    assert handed_over(pair, first) == alone(pair, first)
    before = decode.await_count("pulled_tokens")
    assert handed_over(pair, second) == alone(pair, second)
    assert decode.await_count("pulled_tokens", before + 49) == before + 49


def test_several_requests_at_once_do_not_mix(pair: list[Server]):
    prompts = [tokens(40 + 90 * i, seed=100 + i) for i in range(5)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(lambda prompt: handed_over(pair, prompt), prompts))
    assert texts == [alone(pair, prompt) for prompt in prompts]


def test_blocks_are_free_again_after_they_were_read(pair: list[Server]):
    prefill = pair[0]
    offered = prefill.await_count("offered_requests")
    ended = sum(n for what, n in prefill.counts().items() if what.startswith("lease_ends "))
    assert ended == offered


# ── it fails, and the engine knows ────────────────────────────────────────────────────────


def failed(pair: list[Server], prompt: list[int], params: object, kind: str) -> None:
    """Decode is given tickets that must not work: the text is right, the counter says so."""
    decode = pair[1]
    before = decode.counts().get(kind, 0)
    expected = alone(pair, prompt)
    assert decode.text(prompt, max_tokens=12, kv_transfer_params=params) == expected
    assert decode.await_count(kind, before + 1) == before + 1


def test_a_forged_ticket_is_not_honoured(pair: list[Server]):
    prompt = tokens(150, seed=23)
    params = pair[0].tickets(prompt)
    real = Ticket.parse(params["kvstow"]["tickets"][0])
    fields = {name: getattr(real, name) for name in Ticket.__dataclass_fields__}
    forged = Ticket(**{**fields, "lease": real.lease ^ 1})
    params["kvstow"]["tickets"] = [str(forged)]
    failed(pair, prompt, params, "pulls ticket")


def test_a_ticket_that_was_read_is_not_honoured_again(pair: list[Server]):
    prefill, decode = pair
    prompt = tokens(2 * BLOCK + 30, seed=24)
    params = prefill.tickets(prompt)
    assert decode.text(prompt, max_tokens=12, kv_transfer_params=params) == alone(pair, prompt)
    before = decode.counts()["pulls accepted"]
    decode.post("/reset_prefix_cache", {})
    assert decode.text(prompt, max_tokens=12, kv_transfer_params=params) == alone(pair, prompt)
    assert decode.counts()["pulls accepted"] == before


def test_a_lease_that_ran_out_is_not_honoured(pair: list[Server]):
    prompt = tokens(200, seed=25)
    params = pair[0].tickets(prompt)
    counts = pair[0].counts()  # of leases that earlier tests left, too
    running = counts["offered_requests"] - sum(
        n for what, n in counts.items() if what.startswith("lease_ends ")
    )
    ended = counts.get("lease_ends expired", 0) + running
    assert pair[0].await_count("lease_ends expired", ended, LEASE_SECONDS + 60) == ended
    failed(pair, prompt, params, "pulls expired")


def test_bytes_that_change_on_the_way_fail_the_digest(pair: list[Server]):
    """The producer's memory is written to, for real, while decode pulls from it.

    The kernel lets nobody write there for up to seconds at times; a pull that falls into such a
    pause sees nothing change, and is tried again with another prompt.
    """
    for seed in range(260, 275):
        prompt = tokens(3 * BLOCK + 5, seed=seed)
        expected = alone(pair, prompt)
        before = pair[1].counts()
        text = text_while_scribbling(pair, prompt)
        accepted = before.get("pulls accepted", 0) + 1
        differed = before.get("pulls digest", 0) + 1
        while pair[1].await_count("pulls digest", differed, 1) < differed:
            if pair[1].counts().get("pulls accepted", 0) >= accepted:
                break
        else:
            assert text == expected
            pair[0].post("/reset_prefix_cache", {})
            return
    pytest.fail("no byte changed during fifteen pulls")


def text_while_scribbling(pair: list[Server], prompt: list[int]) -> str:
    """What decode makes of rows that change while it pulls them."""
    params = pair[0].tickets(prompt)
    blocks = Ticket.parse(params["kvstow"]["tickets"][0]).blocks[0].ids.tolist()
    pid, base = worker_of(pair[0])
    over = threading.Event()
    scribbler = threading.Thread(target=scribble, args=(pid, base, blocks, over))
    scribbler.start()
    try:
        return pair[1].text(prompt, max_tokens=12, kv_transfer_params=params)
    finally:
        over.set()
        scribbler.join()


def worker_of(server: Server) -> tuple[int, int]:
    """The worker's process, and where its cache lies."""
    found = re.search(
        r"Worker[^\n]*pid=(\d+)[^\n]*kvstow: \d+ bytes at (0x[0-9a-f]+)",
        server.log.read_text(errors="replace"),
    )
    assert found, server.tail()
    return int(found[1]), int(found[2], 16)


def scribble(pid: int, base: int, blocks: list[int], over: threading.Event) -> None:
    """Write other bytes into some blocks of a process, again and again."""
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        value = 0
        while not over.is_set():
            value = (value + 1) % 256
            for block in blocks:
                os.pwrite(memory.fileno(), bytes([value]) * 64, base + block * ROW + 4096)


# ── somebody leaves ───────────────────────────────────────────────────────────────────────


def test_a_client_that_leaves_while_its_request_loads_leaves_nothing_behind(pair: list[Server]):
    """The producer is stopped meanwhile, so that the load cannot end."""
    prefill, decode = pair
    prompt = tokens(4 * BLOCK, seed=28)
    params = prefill.tickets(prompt)
    pid, _ = worker_of(prefill)
    accepted = decode.counts().get("pulls accepted", 0)
    stop(pid)
    try:
        with pytest.raises(TimeoutError):
            decode.ask(prompt, kv_transfer_params=params, patience=4)
    finally:
        os.kill(pid, signal.SIGCONT)
    other = tokens(4 * BLOCK, seed=29)
    assert handed_over(pair, other) == alone(pair, other)
    assert decode.await_count("pulls accepted", accepted + 1) >= accepted + 1


def test_a_prefill_server_that_hangs_is_given_up_and_met_again(pair: list[Server]):
    """It leaves 30 heartbeats unanswered, one a second: sooner than a transfer may take."""
    prefill, decode = pair
    prompt = tokens(3 * BLOCK, seed=31)
    expected = alone(pair, prompt)
    params = prefill.tickets(prompt)
    pid, _ = worker_of(prefill)
    before = decode.counts()
    stop(pid)
    try:
        assert decode.text(prompt, max_tokens=12, kv_transfer_params=params) == expected
    finally:
        os.kill(pid, signal.SIGCONT)
    gone = before.get("pulls peer", 0) + 1
    assert decode.await_count("pulls peer", gone) == gone
    other = tokens(3 * BLOCK, seed=32)
    assert handed_over(pair, other) == alone(pair, other)


# ── the producer dies ─────────────────────────────────────────────────────────────────────


STALE = tokens(3 * BLOCK + 7, seed=33)


def test_a_prefill_server_killed_in_a_transfer_costs_only_time(
    pair: list[Server], left: dict[str, Any]
):
    """Stopped while decode pulls from it over TCP, then killed."""
    prefill, decode = pair
    prompt = tokens(6 * BLOCK, seed=30)
    expected = alone(pair, prompt)
    left |= {"text": alone(pair, STALE), "params": prefill.tickets(STALE)}
    params = prefill.tickets(prompt)
    pid, _ = worker_of(prefill)
    before = decode.counts()
    stop(pid)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode.text, prompt, max_tokens=12, kv_transfer_params=params)
        time.sleep(3)
        prefill.kill()
        assert answer.result() == expected
    gone = before.get("pulls peer", 0) + 1
    assert decode.await_count("pulls peer", gone) == gone


def test_a_ticket_of_an_earlier_start_is_not_honoured(
    pair: list[Server], launches: list[Launch], logs: Path, left: dict[str, Any]
):
    """At the same address there is a server again, with other blocks."""
    decode = pair[1]
    before = decode.counts().get("pulls expired", 0)
    with running(launches[0], logs=logs) as (again,):
        again.text(tokens(3 * BLOCK, seed=34), max_tokens=1)
        assert decode.text(STALE, max_tokens=12, kv_transfer_params=left["params"]) == left["text"]
        assert decode.await_count("pulls expired", before + 1) == before + 1
        other = tokens(3 * BLOCK, seed=35)
        assert handed_over([again, decode], other) == alone([again, decode], other)
