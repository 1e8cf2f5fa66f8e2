"""Engines that draft tokens by EAGLE: the draft model's rows are made of the next token, too."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import shows
from tiny import FewBlocks, Remote, checkpoint
from vllm_engines import LLAMA, SMALL, Prompts, connector, made_small

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BLOCK = 32
DRAW = Prompts(SMALL["vocab_size"])


def draft(folder: Path) -> Path:
    """A model of one layer that drafts for the small Llama, with random weights."""
    import torch
    from safetensors.torch import save_file

    config = {**made_small(LLAMA), "num_hidden_layers": 1}
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    inner, kv = config["intermediate_size"], config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (heads, hidden),
        "layers.0.self_attn.k_proj": (kv, hidden),
        "layers.0.self_attn.v_proj": (kv, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    torch.manual_seed(5)
    weights = {f"{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    folder.joinpath("config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Remote, Remote]]:
    model = checkpoint(tmp_path_factory.mktemp("model"), LLAMA)
    drafts = draft(tmp_path_factory.mktemp("draft"))
    made: list[Remote] = []
    for _ in ("prefill", "decode"):
        options = FewBlocks(num_blocks=40, draft=str(drafts))
        transfer = connector("kvstow", digest="always", host_bytes=1 << 26, contact_seconds=60)
        engine = Remote(0, str(model), options, transfer)
        engine.imported()
        engine.start()
        engine.ready()
        made.append(engine)
    yield made[0], made[1]
    for engine in made:
        engine.close()


@pytest.mark.parametrize("length", [BLOCK + 1, 300])
def test_a_prompt_is_handed_over(pair: tuple[Remote, Remote], length: int):
    prefill, decode = pair
    prompt = DRAW(length)
    alone = prefill.first({"prompt": prompt})["text"]
    before = decode.counts().get("pulls accepted", 0)
    asks = {"prompt": prompt, "max_tokens": 1, "params": {"do_remote_decode": True}}
    tickets = prefill.first(asks)["params"]
    assert decode.first({"prompt": prompt, "params": tickets})["text"] == alone
    assert decode.counts()["pulls accepted"] == before + 1
    shows("full attention", "drafts")


def test_what_comes_back_ends_where_the_next_token_is_known(pair: tuple[Remote, Remote]):
    _, decode = pair
    prompt = DRAW(6 * BLOCK + 1)
    text = decode.first({"prompt": prompt})["text"]
    assert decode.reset()
    before = decode.counts().get("restored_tokens", 0)
    other = [*prompt[: 6 * BLOCK], prompt[-1] + 1, *DRAW(20)]
    decode.first({"prompt": other})
    forked = decode.counts()["restored_tokens"] - before
    assert forked == 5 * BLOCK, "the last block in common was made of another next token"
    assert decode.reset()
    assert decode.first({"prompt": prompt})["text"] == text
    assert decode.counts().get("restore_failures", 0) == 0
