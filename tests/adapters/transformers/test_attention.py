"""Generation whose attention reads rows in place: on the GPU, or in Triton's interpreter."""

import pytest
import torch

from kvstow.adapters.transformers import Cache, ModelMemory
from kvstow.errors import ModelError
from kvstow.testing.tiny_models import tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_rows_read_in_place_give_the_default_caches_tokens(family):
    """Windows, sinks and states among them; chunked prompts, the second one padded on the left.

    With 23 tokens the second new one begins a block, and is the first that a window of 24 cuts.
    """
    model = tiny_model(family).to(DEVICE)
    ids = torch.randint(0, 250, (2, 23), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    wishes = {
        "attention_mask": mask,
        "max_new_tokens": 3,
        "do_sample": False,
        "prefill_chunk_size": 16,
    }
    theirs = model.generate(ids, **wishes)
    with ModelMemory.of(model, budget=4 << 20, block_tokens=4, in_place=True) as memory:
        with Cache(memory) as cache:
            ours = model.generate(ids, past_key_values=cache, **wishes)
        memory.ledger.check()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["deepseek_v3", "llama4_text"])
def test_attention_that_cannot_read_rows_in_place_is_refused_with_a_hint(family):
    model = tiny_model(family).to(DEVICE)
    ids = torch.ones((1, 4), dtype=torch.int64, device=DEVICE)
    with (
        pytest.raises(ModelError, match="in_place"),
        ModelMemory.of(model, budget=4 << 20, block_tokens=4, in_place=True) as memory,
        Cache(memory) as cache,
    ):
        model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
