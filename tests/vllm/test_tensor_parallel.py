"""Prefill on one rank, decode on three: each decode rank pulls its own heads."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serving import Launch, Server, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

RANKS = 3
"""SmolLM2 has nine heads and three kv heads."""


@pytest.fixture(scope="module")
def pair(smollm2: Path, logs: Path) -> Iterator[list[Server]]:
    # four processes that compute, and wait by spinning: first contact takes up to 8 s on two cores
    settings = {
        "digest": "always",
        "lease_seconds": 120,
        "transfer_seconds": 120,
        "contact_seconds": 60,
    }
    prefill = Launch(model=smollm2, name="m", settings=settings)
    decode = Launch(
        model=smollm2, name="m", settings=settings, options=("-tp", str(RANKS)), rows=False
    )
    with running(prefill, decode, logs=logs) as servers:
        yield servers


@pytest.mark.parametrize("count", [5, 128, 300])
def test_three_ranks_take_over_from_one(pair: list[Server], count: int):
    prefill, decode = pair
    prompt = np.random.default_rng(count).integers(100, 40_000, count).tolist()
    before = decode.counts().get("pull accepted", 0)
    params = prefill.tickets(prompt)
    text = decode.text(prompt, max_tokens=8, kv_transfer_params=params)
    assert text == prefill.text(prompt, max_tokens=8)
    assert decode.await_count("pull accepted", before + RANKS) == before + RANKS
