"""Requests of the ledger behind one batch: all of them are admitted, forked and grown, or none."""

import pytest
import torch

from kvstow.adapters.transformers import Cache, ModelMemory
from kvstow.errors import BlockError, OutOfBlocks
from kvstow.testing.tiny_models import tiny_model


def forward(model, ids, cache):
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


def test_sequences_that_do_not_all_fit_are_not_admitted_at_all():
    model = tiny_model("llama")
    with ModelMemory.of(model, budget=80 << 10, block_tokens=16) as memory:
        free = memory.pool.num_free(0)
        cache = Cache(memory)
        with pytest.raises(OutOfBlocks):
            forward(model, torch.zeros((free + 1, 3), dtype=torch.long), cache)
        assert len(memory.ledger) == 0
        assert memory.pool.num_free(0) == free


def test_prompts_with_different_hits_share_none():
    model = tiny_model("llama")
    one, other = torch.arange(16), torch.arange(100, 116)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory, tokens=one.unsqueeze(0)) as cache:
            forward(model, one.unsqueeze(0), cache)
        with Cache(memory, tokens=torch.stack([one, one])) as cache:
            assert cache.get_seq_length() == 12
        with Cache(memory, tokens=torch.stack([one, other])) as cache:
            assert cache.get_seq_length() == 0


def test_kept_sequences_go_on_as_if_the_others_had_never_been():
    model = tiny_model("falcon_h1")
    ids = torch.arange(33).view(3, 11)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory) as cache:
            forward(model, ids[:, :10], cache)
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
            found = forward(model, ids[[2, 2, 0, 0], 10:], cache)
        assert len(memory.ledger) == 0
        for row, origin in enumerate([2, 2, 0, 0]):
            with Cache(memory) as alone:
                forward(model, ids[origin : origin + 1, :10], alone)
                expected = forward(model, ids[origin : origin + 1, 10:], alone)
            torch.testing.assert_close(found[row], expected[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [-3, 0, 19, 21, 31])
def test_a_request_is_continued_from_the_tokens_that_it_holds(num_tokens):
    memory = ModelMemory.of(tiny_model("gemma3_text"), budget=1 << 20, block_tokens=16)
    request = memory.ledger.admit(20).request
    with pytest.raises(BlockError, match=f"request {request} holds 20 tokens, not {num_tokens}\n"):
        Cache(memory, requests=[request], num_tokens=num_tokens)


def test_forks_that_do_not_all_fit_leave_the_sequences_as_they_were():
    model = tiny_model("falcon_h1")
    ids = torch.arange(20).view(2, 10)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=16) as memory:
        with Cache(memory) as cache:
            forward(model, ids[:, :9], cache)
            before = cache.requests, memory.pool.num_free(0)
            with pytest.raises(OutOfBlocks):
                cache.batch_repeat_interleave(memory.pool.num_free(0) + 1)
            assert (cache.requests, memory.pool.num_free(0)) == before
            found = forward(model, ids[:, 9:], cache)
        memory.ledger.check()
    torch.testing.assert_close(found[:, -1], model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)
