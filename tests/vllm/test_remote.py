"""A prompt that a server of two ranks prefilled is found by one of one rank, after both restarted.

Through S3 (SeaweedFS) and Mooncake; a server with other weights of the same shape gets misses. Host
memory ends with its server, so what a server finds right after its start came from the store.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from serving import Launch, Server, running
from test_tensor_parallel import LLAMA

from servers import Mooncake, Seaweed
from waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

BLOCK = 128
PROMPT = np.random.default_rng(5).integers(100, 40_000, 2 * BLOCK + 40).tolist()


def model_at(folder: Path, words: Path, seed: int) -> Path:
    """A small model with random weights, large enough for its text to depend on its cache."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    made = LlamaForCausalLM(LlamaConfig(**LLAMA, initializer_range=0.15))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    weights = {name: weight.contiguous() for name, weight in made.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in words.iterdir():
        if file.name not in ("config.json", "model.safetensors", "generation_config.json"):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(params=[Seaweed, Mooncake])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with request.param(tmp_path / "server") as server:
        yield f"{server.url}&budget=30&load=60"


def await_remote(server: Server, least: int) -> None:
    """Wait until so many rows are in the store: a server that ends drops what waits. Counters are
    told when the engine makes a step."""

    def stored() -> bool:
        server.text([7, 8, 9], max_tokens=1)
        return server.counts().get("remote_stored_rows", 0) >= least

    wait_for(stored)


def test_a_prompt_of_two_ranks_is_decoded_by_one_with_the_same_weights_only(
    url: str, smollm2: Path, tmp_path: Path, logs: Path
):
    first, second = (model_at(tmp_path / f"model{seed}", smollm2, seed) for seed in (3, 4))
    settings = {"host_bytes": 64 << 20, "remote": url, "model": "m"}

    def launch(model: Path, ranks: int) -> Launch:
        options = ("-tp", str(ranks))
        return Launch(model=model, name="m", settings=settings, options=options, rows=ranks == 1)

    with running(launch(first, 2), logs=logs) as (prefill,):
        text = prefill.text(PROMPT, max_tokens=12)
        assert prefill.counts().get("restored_tokens", 0) == 0
        await_remote(prefill, 4)  # two blocks on two ranks
    for ranks in (1, 2, 1):  # decode, and then both once more
        with running(launch(first, ranks), logs=logs) as (server,):
            assert server.text(PROMPT, max_tokens=12) == text
            wanted = ranks * 2 * BLOCK  # each rank counts its own
            assert server.await_count("restored_tokens", wanted) == wanted
            assert server.counts().get("restore_failures", 0) == 0
    with running(launch(second, 1), logs=logs) as (stranger,):
        assert stranger.text(PROMPT, max_tokens=12) != text
        assert stranger.counts().get("restored_tokens", 0) == 0
        await_remote(stranger, 2)  # it looked, missed, and stored its own
