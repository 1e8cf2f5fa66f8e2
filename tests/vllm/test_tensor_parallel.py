"""Ranks of either side: every decode rank pulls its own heads, from whichever ranks have them.

Nobody tells prefill how many ranks decode has: it learns that when they connect.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from serving import Launch, Server, free_port, running, shows

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

LLAMA = {
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

HYBRID = json.loads((Path(__file__).parent / "tiny_models" / "qwen3next.json").read_text())
"""Gated delta nets, whose states two ranks share out: channels of q, k and v, and heads."""

SETTINGS = {
    "digest": "always",
    "lease_seconds": 300,
    "transfer_seconds": 120,
    "contact_seconds": 60,  # ranks wait by spinning: first contact takes long on few cores
}


def checkpoint(folder: Path, config: dict[str, Any], smollm2: Path) -> Path:
    """A small model with random weights, large enough for its text to depend on its cache, and
    another one's words."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps({**config, "initializer_range": 0.15}))
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    made.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    for file in smollm2.iterdir():
        if file.name not in ("config.json", "model.safetensors", "generation_config.json"):
            shutil.copy(file, folder)
    return folder


class Pair(NamedTuple):
    """Prefill and decode, and how many ranks decode has."""

    kind: str
    prefill: Server
    decode: Server
    ranks: int


@pytest.fixture(
    scope="module",
    params=[
        *(("llama", *sizes) for sizes in ((1, 2), (2, 1), (2, 2), (2, 3))),
        *(("hybrid", *sizes) for sizes in ((1, 2), (2, 1))),
    ],
    ids=lambda each: f"{each[0]}-{each[1]}-to-{each[2]}",
)
def pair(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    kind, *sizes = request.param
    config = {"llama": LLAMA, "hybrid": HYBRID}[kind]
    model = checkpoint(tmp_path_factory.mktemp("model"), config, smollm2)
    dtype = config.get("torch_dtype") or config["dtype"]
    launches = [
        Launch(
            model=model,
            name="m",
            settings={**SETTINGS, "listen": f"tcp://127.0.0.1:{free_port()}"},  # of its first rank
            options=("-tp", str(size), "--dtype", dtype),
            rows=size == 1,
        )
        for size in sizes
    ]
    with running(*launches, logs=tmp_path_factory.mktemp("logs")) as servers:
        yield Pair(kind, servers[0], servers[1], sizes[1])


def drawn(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 40_000, count).tolist()


def test_every_rank_takes_over_and_the_lease_ends_with_the_last(pair: Pair):
    """In bfloat16 sums of other numbers of ranks differ: there the first tokens are compared."""
    max_tokens = 2 if pair.kind == "hybrid" else 8
    for count in (5, 12, 128, 300):
        prompt = drawn(count, count)
        before = {each: each.counts() for each in (pair.prefill, pair.decode)}
        params = pair.prefill.tickets(prompt)
        text = pair.decode.text(prompt, max_tokens=max_tokens, kv_transfer_params=params)
        assert text == pair.prefill.text(prompt, max_tokens=max_tokens), count
        accepted = before[pair.decode].get("pulls accepted", 0) + pair.ranks
        assert pair.decode.await_count("pulls accepted", accepted) == accepted
        producers = len(params["kvstow"]["tickets"])
        ended = before[pair.prefill].get("lease_ends read", 0) + producers
        assert pair.prefill.await_count("lease_ends read", ended) == ended
        assert "lease_ends expired" not in pair.prefill.counts()
    shows({"llama": "full attention", "hybrid": "recurrent states"}[pair.kind], "other tp")


def test_another_beginning_changes_the_first_tokens(pair: Pair):
    """Otherwise equal texts would say nothing of what was handed over."""
    prompt = drawn(12, 12)
    texts = [
        pair.prefill.text([*beginning, *prompt[6:]], max_tokens=2)
        for beginning in (prompt[:6], drawn(1, 6))
    ]
    assert texts[0] != texts[1]
