"""Prefill hangs while it writes into decode's blocks: decode goes on, in others.

The prefill process stops itself when it has written half of what decode waits for
(`plugins/stopped_writes.py`), and writes the rest when it goes on. Decode has few blocks, and would
give those away at once. With two ranks on either side every rank pulls from its like.
"""

import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Launch, Server, running
from tiny import checkpoint
from vllm_engines import GEMMA, LLAMA, SMALL, Prompts

from waiting import has_stopped, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE / "plugins"), str(HERE.parents[1] / "src")])
DRAW = Prompts(SMALL["vocab_size"])
BLOCK = 32
LENGTH = 20 * BLOCK - 5
TRANSFER_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and as many ranks in both servers; `config` None: a small real one. Of `num_blocks`
    one is vLLM's own, and a pull writes to `held` of them."""

    config: dict[str, Any] | None = None
    ranks: int = 1
    num_blocks: int = 100
    held: int = 20


WINDOW_BLOCKS = 3  # 64 tokens, of which some are in the block before and some in the last
CASES = {
    "dense": Case(),
    "dense, 2 ranks": Case(config=LLAMA, ranks=2),
    "hybrid": Case(config=GEMMA, num_blocks=240, held=20 + 5 * WINDOW_BLOCKS),
}


@pytest.fixture(scope="module")
def stops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, prefill stops when it writes."""
    return tmp_path_factory.mktemp("stops") / "now"


class Pair:
    """Prefill, which can be stopped, and decode."""

    def __init__(self, case: Case, servers: list[Server], stops: Path) -> None:
        self.case = case
        self.prefill, self.decode = servers
        self._stops = stops

    def stopped(self) -> list[int]:
        """Processes of prefill that hang."""
        return [pid for pid in self.prefill.worker_pids() if has_stopped(pid)]

    @contextmanager
    def hung(self, prompt: list[int], patience: float = 600) -> Iterator[Future[list[int]]]:
        """Decode is asked to continue, and all ranks of prefill hang in the middle of their write.
        They go on when the block is left."""
        params = self.prefill.tickets(prompt)
        stopped: list[int] = []
        with ThreadPoolExecutor(1) as pool:
            self._stops.touch()
            try:
                more = {"patience": patience, "kv_transfer_params": params}
                answer = pool.submit(text, self.decode, prompt, **more)
                wait_for(lambda: len(self.stopped()) == self.case.ranks)
                stopped += self.stopped()
                self._stops.unlink()
                yield answer
            finally:
                self._stops.unlink(missing_ok=True)
                for pid in stopped:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)

    def hands_over(self) -> None:
        """A hand-over works, in every rank."""
        prompt = DRAW(LENGTH)
        accepted = self.decode.counts().get("pulls accepted", 0) + self.case.ranks
        expected = text(self.prefill, prompt)
        params = self.prefill.tickets(prompt)
        assert text(self.decode, prompt, kv_transfer_params=params) == expected
        assert self.decode.await_count("pulls accepted", accepted) == accepted

    def is_empty(self) -> bool:
        """Whether decode has all its blocks back."""
        return gauge(self.decode, "vllm:kv_cache_usage_perc") == 0


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def pair(
    request: pytest.FixtureRequest,
    smollm2: Path,
    tmp_path_factory: pytest.TempPathFactory,
    logs: Path,
    stops: Path,
) -> Iterator[Pair]:
    case: Case = request.param
    folder = tmp_path_factory.mktemp("model")
    launches = [
        Launch(
            model=checkpoint(folder, case.config) if case.config else smollm2,
            name="model",
            settings={
                "digest": "always",
                "direction": "write",
                "lease_seconds": 300,
                "transfer_seconds": TRANSFER_SECONDS,
                "contact_seconds": TRANSFER_SECONDS,
            },
            environment={"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", **more},
            options=(
                *("--block-size", f"{BLOCK}", "--num-gpu-blocks-override", f"{case.num_blocks}"),
                *("-tp", f"{case.ranks}", "--skip-tokenizer-init"),
            ),
        )
        for more in ({"KVSTOW_STOPPED_WRITES": str(stops), "PYTHONPATH": PATH}, {})
    ]
    with running(*launches, logs=logs) as servers:
        yield Pair(case, servers, stops)


def text(server: Server, prompt: list[int], max_tokens: int = 8, **more: Any) -> list[int]:
    """The tokens of an answer."""
    options = {"return_token_ids": True, "ignore_eos": True}
    answer = server.ask(prompt, max_tokens=max_tokens, **options, **more)
    return answer["choices"][0]["token_ids"]


def gauge(server: Server, name: str) -> float:
    """One of vLLM's own."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(s.value for family in families for s in family.samples if s.name == name)


def texts(server: Server, prompts: list[list[int]], max_tokens: int = 8) -> list[list[int]]:
    """Answers to all of them at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: text(server, prompt, max_tokens), prompts))


def test_decode_computes_the_prompt_in_other_blocks(pair: Pair):
    """Of two ranks one hangs. Both of decode's fail, as each waits for a word of either, but only
    one may still be written to."""
    prefill, decode = pair.prefill, pair.decode
    prompt = DRAW(LENGTH)
    meanwhile = [DRAW(200 + 40 * k) for k in range(6)]
    expected, others = text(prefill, prompt), texts(prefill, meanwhile)
    pair.hands_over()
    before = decode.counts()
    with pair.hung(prompt) as answer:
        for pid in pair.stopped()[1:]:
            os.kill(pid, signal.SIGCONT)
        assert answer.result() == expected
        held = before.get("held_blocks", 0) + pair.case.held
        assert decode.await_count("held_blocks", held) == held
        assert texts(decode, meanwhile) == others
        assert len(pair.stopped()) == 1
        assert decode.counts().get("released_blocks", 0) == before.get("released_blocks", 0)
    assert decode.await_count("released_blocks", held) == held
    faults = ("pulls timeout", "pulls peer")
    found = sum(decode.counts().get(kind, 0) - before.get(kind, 0) for kind in faults)
    assert found == pair.case.ranks
    wait_for(pair.is_empty)
    pair.hands_over()


def test_late_bytes_change_no_text(pair: Pair):
    """The client has left, so the blocks that prefill writes to would be the next to be given:
    short prompts would have all of them, and each sees all of its own."""
    decode, case = pair.decode, pair.case
    prompts = [DRAW(70 + k) for k in range(8)]
    expected = texts(pair.prefill, prompts, 200)
    before = decode.counts()

    def all_run() -> bool:
        return gauge(decode, "vllm:num_requests_running") == len(prompts)

    with ThreadPoolExecutor(1) as pool:
        with pair.hung(DRAW(LENGTH), patience=3) as answer:
            with pytest.raises(TimeoutError):
                answer.result()
            held = before.get("held_blocks", 0) + case.held
            assert decode.await_count("held_blocks", held) == held
            used = gauge(decode, "vllm:kv_cache_usage_perc")
            assert used == pytest.approx(case.held / (case.num_blocks - 1))
            assert decode.counts().get("released_blocks", 0) == before.get("released_blocks", 0)
            while True:  # they may be over before anybody has seen them run
                running = pool.submit(texts, decode, prompts, 200)
                wait_for(lambda running=running: all_run() or running.done())
                if all_run():
                    break
                assert running.result() == expected
        assert running.result() == expected
    assert decode.await_count("released_blocks", held) == held
    wait_for(pair.is_empty)
    pair.hands_over()


def test_a_prefill_that_dies_while_it_writes_is_not_waited_for(pair: Pair):
    """Its blocks come back when decode's transfer engine was replaced."""
    prefill, decode = pair.prefill, pair.decode
    prompt = DRAW(LENGTH)
    expected = text(prefill, prompt)
    held = decode.counts()["held_blocks"] + pair.case.held
    with pair.hung(prompt) as answer:
        prefill.kill()
        assert answer.result() == expected
        assert decode.await_count("held_blocks", held) == held
    assert decode.await_count("released_blocks", held) == held
    wait_for(pair.is_empty)
