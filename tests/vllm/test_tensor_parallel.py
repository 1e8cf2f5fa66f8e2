"""Ranks of either side: every decode rank pulls its own heads, from whichever ranks have them.

Nobody tells prefill how many ranks decode has: it learns that when they connect.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from serving import Launch, Server, free_port, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Heads that two ranks share out, and three."""

SETTINGS = {
    "digest": "always",
    "lease_seconds": 300,
    "transfer_seconds": 120,
    "contact_seconds": 60,  # ranks wait by spinning: first contact takes long on few cores
}


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, large enough for its text to depend on its cache, and
    another one's words."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    made = LlamaForCausalLM(LlamaConfig(**CONFIG, initializer_range=0.15))
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = {name: weight.contiguous() for name, weight in made.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in smollm2.iterdir():
        if file.name not in ("config.json", "model.safetensors", "generation_config.json"):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(
    scope="module", params=[(1, 2), (2, 1), (2, 3)], ids=lambda sizes: f"{sizes[0]}-to-{sizes[1]}"
)
def pair(
    request: pytest.FixtureRequest, model: Path, logs: Path
) -> Iterator[tuple[Server, Server, int]]:
    launches = [
        Launch(
            model=model,
            name="m",
            settings={**SETTINGS, "listen": f"tcp://127.0.0.1:{free_port()}"},  # of its first rank
            options=("-tp", str(size)),
            rows=size == 1,
        )
        for size in request.param
    ]
    with running(*launches, logs=logs) as servers:
        yield servers[0], servers[1], request.param[1]


def test_every_rank_takes_over_and_the_lease_ends_with_the_last(
    pair: tuple[Server, Server, int],
):
    prefill, decode, ranks = pair
    for count in (5, 128, 300):
        prompt = np.random.default_rng(count).integers(100, 40_000, count).tolist()
        before = {each: each.counts() for each in (prefill, decode)}
        params = prefill.tickets(prompt)
        text = decode.text(prompt, max_tokens=8, kv_transfer_params=params)
        assert text == prefill.text(prompt, max_tokens=8)
        accepted = before[decode].get("pulls accepted", 0) + ranks
        assert decode.await_count("pulls accepted", accepted) == accepted
        producers = len(params["kvstow"]["tickets"])
        ended = before[prefill].get("lease_ends read", 0) + producers
        assert prefill.await_count("lease_ends read", ended) == ended
        assert "lease_ends expired" not in prefill.counts()
