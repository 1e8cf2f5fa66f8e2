"""Instances with other tokens per block: joined where tokens lie in order, refused elsewhere."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Launch, Server, running

from kvstow.plan import manifest
from kvstow.plan.layout import Layout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
SIZES = (16, 32)
LENGTHS = (1, 2, 15, 16, 31, 32, 33, 64, 129)
MAX_TOKENS = 8


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


# ── latents ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def latent_servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[Server], list[Layout]]]:
    """DeepSeek-V3, tiny, with 16 and with 32 tokens per block (`plugins/mla_blocks.py`)."""
    home = tmp_path_factory.mktemp("latents")
    (home / "config.json").write_text((HERE / "tiny_models" / "dsv3.json").read_text())
    path = f"{HERE / 'plugins'}:{HERE.parents[1] / 'src'}"
    launches = [
        Launch(
            model=home,
            name="m",
            settings={
                "digest": "always",
                "contact_seconds": 60,  # of two servers on few cores
                "unverified": "weights are drawn from one seed",
                "manifest_file": str(home / f"layout{size}"),
            },
            environment={"PYTHONPATH": path, "KVSTOW_MLA_BLOCK": str(size)},
            options=("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32"),
        )
        for size in SIZES
    ]
    with running(*launches, logs=home) as servers:
        layouts = [manifest.decode((home / f"layout{size}.0-0").read_bytes()) for size in SIZES]
        yield servers, layouts


def answer(server: Server, tokens: list[int], **more: Any) -> list[int]:
    found = server.ask(tokens, max_tokens=MAX_TOKENS, return_token_ids=True, **more)
    return found["choices"][0]["token_ids"]


@pytest.mark.parametrize("way", [1, -1], ids=["16 to 32", "32 to 16"])
def test_latents_are_handed_over_into_blocks_of_another_size(
    latent_servers: tuple[list[Server], list[Layout]], way: int
):
    """The right text is how the prefill engine itself goes on, one token at a time."""
    servers, layouts = latent_servers
    assert [layout.groups[0].group.block_tokens for layout in layouts] == list(SIZES)
    prefill, decode = servers[::way]
    before = decode.counts().get("pull accepted", 0)
    texts: set[tuple[int, ...]] = set()
    for length in LENGTHS:
        tokens = random.Random(way * length).choices(range(10, 49_000), k=length)
        first, *rest = answer(prefill, tokens)
        tickets = prefill.tickets([*tokens, first])
        found = answer(decode, [*tokens, first], kv_transfer_params=tickets)
        assert found[: len(rest)] == rest, length
        texts.add(tuple(rest))
    assert len(texts) == len(LENGTHS), "the text depends on the prompt"
    accepted = before + len(LENGTHS)
    assert decode.await_count("pull accepted", accepted) == accepted
    assert decode.counts().get("pull refused", 0) == 0
