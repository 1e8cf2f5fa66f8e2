"""Sequences behind a cache are admitted, forked and grown together; what is kept of them when they
end, here and in a store."""

import copy
from pathlib import Path

import pytest
import torch

from kvstow.adapters.transformers import Cache, ModelMemory, cache_name
from kvstow.errors import BlockError, OutOfBlocks, StoreError
from kvstow.offload.store import Store
from kvstow.testing.tiny_models import tiny_model

PROMPT = torch.arange(40).unsqueeze(0)


def forward(model, ids, cache):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{cache_name(model): cache}).logits[:, -1]


def continued(model, memory, ids=PROMPT, **given):
    """The last logits of a prompt, and how many tokens were not computed for them."""
    with Cache(memory, tokens=ids, **given) as cache:
        hit = cache.num_tokens
        return forward(model, ids[:, hit:], cache), hit


# ── prefixes ──────────────────────────────────────────────────────────────────────────


# ── a store ───────────────────────────────────────────────────────────────────────────


def memory_of(model):
    return ModelMemory.of(model, budget=1 << 20, block_tokens=4)


def store_of(folder: Path, memory: ModelMemory) -> Store:
    return Store.open(folder / "store", memory.layout, capacity=4 << 20)


def test_generated_tokens_come_back_too(tmp_path: Path):
    model = tiny_model("llama")
    ids = torch.arange(20).unsqueeze(0)
    wishes = {"max_new_tokens": 13, "min_new_tokens": 13, "do_sample": False}
    with (
        memory_of(model) as memory,
        store_of(tmp_path, memory) as store,
        Cache(memory, tokens=ids, store=store) as cache,
    ):
        text = model.generate(ids, past_key_values=cache, **wishes)
    with memory_of(model) as memory, store_of(tmp_path, memory) as store:
        assert continued(model, memory, text, store=store)[1] == 32


def test_what_the_memory_still_knows_is_not_loaded(tmp_path: Path):
    model = tiny_model("llama")
    with memory_of(model) as memory, store_of(tmp_path, memory) as store:
        continued(model, memory, PROMPT[:, :21], store=store)
        with Cache(memory, tokens=PROMPT, store=store) as cache:
            before = cache.blocks(0)[0].ids[:5].tolist()
            assert cache.num_tokens == 20
            forward(model, PROMPT[:, 20:], cache)
            assert cache.blocks(0)[0].ids[:5].tolist() == before
        wanted, _ = continued(model, memory_of(model))
        found, hit = continued(model, memory, store=store)
        assert hit == 36
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_batch_is_loaded_where_all_of_it_is_there(tmp_path: Path):
    model = tiny_model("llama")
    both = torch.stack([torch.arange(41), torch.arange(100, 141)])
    with memory_of(model) as memory, store_of(tmp_path, memory) as store:
        continued(model, memory, both[:1], store=store)
        assert continued(model, memory, both, store=store)[1] == 0
    with memory_of(model) as memory, store_of(tmp_path, memory) as store:
        wanted, _ = continued(model, memory_of(model), both)
        continued(model, memory, both[1:], store=store)
    with memory_of(model) as memory, store_of(tmp_path, memory) as store:
        found, hit = continued(model, memory, both, store=store)
        assert hit == 40
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_rows_that_are_gone_when_they_are_loaded_are_computed(tmp_path: Path, monkeypatch):
    model = tiny_model("llama")
    with memory_of(model) as memory, store_of(tmp_path, memory) as store:
        wanted, _ = continued(model, memory, store=store)
    with memory_of(model) as memory, store_of(tmp_path, memory) as store:
        load = store.load_rows
        monkeypatch.setattr(store, "load_rows", lambda *given: load(*given) & False)
        found, hit = continued(model, memory, store=store)
        assert hit == 0
        assert torch.equal(found, wanted)
        memory.ledger.check()


def test_another_checkpoint_of_the_same_shape_takes_no_rows_from_the_store(tmp_path: Path):
    """It got the first one's rows, and wrong tokens, while models were known by their type."""
    model = tiny_model("llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    with memory_of(model) as memory, store_of(tmp_path, memory) as store:
        continued(model, memory, store=store)
        with memory_of(other) as theirs, pytest.raises(StoreError, match="weights"):
            continued(other, theirs, store=store)


def test_differently_padded_prompts_share_no_rows_in_a_store(tmp_path: Path):
    model = tiny_model("llama")
    mask = torch.ones_like(PROMPT)
    mask[:, :4] = 0
    with memory_of(model) as memory, store_of(tmp_path, memory) as store:
        continued(model, memory, store=store)
    with (
        memory_of(model) as memory,
        store_of(tmp_path, memory) as store,
        Cache(memory, tokens=PROMPT, attention_mask=mask, store=store) as cache,
    ):
        assert cache.num_tokens == 0


# ── requests of the ledger ────────────────────────────────────────────────────────────


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


def test_requests_of_one_cache_hold_equally_many_tokens():
    memory = ModelMemory.of(tiny_model("gemma3_text"), budget=1 << 20, block_tokens=16)
    requests = [memory.ledger.admit(length).request for length in (20, 21)]
    with pytest.raises(BlockError, match=r"hold 20 and 21 tokens\n\nhint: "):
        Cache(memory, requests=requests)


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
    torch.testing.assert_close(found, model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)
