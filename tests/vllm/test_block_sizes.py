"""Instances with different tokens per block are not joined: said aloud, and computed anew."""

from pathlib import Path

import numpy as np
import pytest
from serving import Launch, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_different_block_sizes_are_refused_and_the_text_is_right(smollm2: Path, logs: Path):
    """vLLM's CPU kernels keep keys transposed over a block: there is no route by tokens."""
    sizes = (128, 64)
    launches = [
        Launch(model=smollm2, name="m", options=("--block-size", str(size))) for size in sizes
    ]
    prompt = np.random.default_rng(3).integers(100, 40_000, 200).tolist()
    with running(*launches, logs=logs) as (prefill, decode):
        params = prefill.tickets(prompt)
        text = decode.text(prompt, max_tokens=8, kv_transfer_params=params)
        assert text == prefill.text(prompt, max_tokens=8)
        assert decode.await_count("pull refused") == 1
        assert "tokens per state is 128 in the source, 64 in the destination" in (
            decode.log.read_text(errors="replace")
        )
