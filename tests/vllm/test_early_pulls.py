"""Hand-overs that are over before vLLM plans their request: real servers, caches in shared memory.

Failures are made by the producer: it forgets a lease, or its process is killed.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from serving import Launch, Server, running, shows

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BLOCK = 32
MAPPED = {"KVSTOW_SHARED_ROWS": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}


@pytest.fixture(scope="module")
def pair(smollm2: Path, logs: Path) -> Iterator[list[Server]]:
    launch = Launch(
        model=smollm2,
        name="smollm2",
        settings={"digest": "always", "lease_seconds": 4, "early_seconds": 1.0},
        environment=MAPPED,
        options=("--block-size", str(BLOCK)),
    )
    with running(launch, launch, logs=logs) as servers:
        meet(servers)
        yield servers


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 40_000, count).tolist()


def meet(pair: list[Server]) -> None:
    """The first request is loaded beside the steps: engines meet by it."""
    prompt = tokens(3 * BLOCK, seed=1)
    assert handed_over(pair, prompt) == alone(pair, prompt)
    assert pair[1].await_count("pull_paths mapped") == 1
    assert pair[1].counts().get("early_pulls declined") == 1


def handed_over(pair: list[Server], prompt: list[int], max_tokens: int = 8) -> str:
    params = pair[0].tickets(prompt)
    return pair[1].text(prompt, max_tokens=max_tokens, kv_transfer_params=params)


def alone(pair: list[Server], prompt: list[int], max_tokens: int = 8) -> str:
    return pair[0].text(prompt, max_tokens=max_tokens)


def grown(server: Server, before: dict[str, float], what: str, least: float) -> float:
    return server.await_count(what, before.get(what, 0) + least, 10) - before.get(what, 0)


@pytest.mark.parametrize("count", [BLOCK + 1, 2 * BLOCK, 5 * BLOCK, 5 * BLOCK + 7])
def test_a_prompt_is_here_when_its_request_is_planned(pair: list[Server], count: int):
    prompt, before = tokens(count, seed=count), pair[1].counts()
    assert handed_over(pair, prompt) == alone(pair, prompt)
    assert grown(pair[1], before, "early_pulls accepted", 1) == 1
    whole = (count - 1) // BLOCK * BLOCK
    assert grown(pair[1], before, "pulled_tokens", whole) == whole
    shows("full attention", "hand-over")


def test_what_is_here_already_is_not_pulled_again(pair: list[Server]):
    beginning = tokens(4 * BLOCK, seed=40)
    prompts = [[*beginning, *tokens(2 * BLOCK, seed=41 + k)] for k in range(2)]
    assert handed_over(pair, prompts[0]) == alone(pair, prompts[0])
    before = pair[1].counts()
    assert handed_over(pair, prompts[1]) == alone(pair, prompts[1])
    assert grown(pair[1], before, "pulled_tokens", BLOCK) == BLOCK
    assert handed_over(pair, prompts[1]) == alone(pair, prompts[1])  # nothing is left to pull
    assert grown(pair[1], before, "early_pulls accepted", 1) == 1


def test_a_prompt_shorter_than_a_block_is_computed(pair: list[Server]):
    prompt, before = tokens(BLOCK // 2, seed=60), pair[1].counts()
    assert handed_over(pair, prompt) == alone(pair, prompt)
    assert pair[1].counts().get("pulls accepted") == before.get("pulls accepted")


def test_a_fence_that_fails_in_the_middle_of_a_batch_leaves_all_texts_right(pair: list[Server]):
    """Some leases have ended, and the producer computes in their blocks; neighbours decode on."""
    prompts = [tokens(6 * BLOCK + k, seed=70 + k) for k in range(6)]
    right = [alone(pair, prompt, 24) for prompt in prompts]
    stale = [pair[0].tickets(prompt) for prompt in prompts[:3]]
    before = pair[0].counts()
    assert grown(pair[0], before, "lease_ends expired", 3) >= 3
    for k in range(10):  # other prompts, until the offered blocks hold something else
        pair[0].text(tokens(20 * BLOCK, seed=100 + k), max_tokens=1)
    fresh = [pair[0].tickets(prompt) for prompt in prompts[3:]]
    here = pair[1].counts()
    order = [0, 3, 1, 4, 2, 5]
    with ThreadPoolExecutor(6) as threads:
        texts = [
            threads.submit(
                pair[1].text, prompts[i], max_tokens=24, kv_transfer_params=[*stale, *fresh][i]
            )
            for i in order
        ]
    assert {i: text.result() for i, text in zip(order, texts, strict=True)} == dict(
        enumerate(right)
    )
    assert grown(pair[1], here, "early_pulls failed", 3) + 0 >= 1
    assert grown(pair[1], here, "early_pulls accepted", 1) >= 1


def test_a_dead_prefill_leaves_the_text_right(pair: list[Server]):
    """The last test: the prefill server is killed with tickets out."""
    prompt = tokens(6 * BLOCK, seed=90)
    right, params = alone(pair, prompt), pair[0].tickets(prompt)
    pair[0].kill()
    assert pair[1].text(prompt, max_tokens=8, kv_transfer_params=params) == right
