"""A forward pass that an exception ends leaves nothing behind that somebody could find."""

import functools
from contextlib import contextmanager, suppress

import pytest
import torch

import kvstow
from kvstow.adapters.transformers import ModelMemory, cache_name
from kvstow.errors import BlockError, StoreError
from kvstow.testing import tiny_models
from kvstow.transformers import Cache

BLOCK_TOKENS = 8
RECURRENT = ["mamba2", "minimax", "qwen3_next"]


tiny_model = functools.cache(tiny_models.tiny_model)


class Interrupted(Exception):
    pass


@contextmanager
def interrupted_before(model, layer):
    """Passes of the model end when they come to that layer."""

    def stop(*_, **__):
        raise Interrupted

    name = f"layers.{layer}"
    module = next(module for at, module in model.named_modules() if at.endswith(name))
    module.forward = stop  # not a hook: a model that has other hooks than before is refused
    try:
        yield
    finally:
        del module.forward


def one_pass(model, cache, ids):
    with torch.no_grad():
        model(ids, use_cache=True, **{cache_name(model): cache})


def memory_for(model):
    return ModelMemory.of(model, budget="2MiB", block_tokens=BLOCK_TOKENS)


def generated(model, ids, cache=None):
    """The three tokens that follow. Mamba-2 is given those that its cache has not seen."""
    given = {} if cache is None else {cache_name(model): cache}
    seen = cache.num_tokens if "cache_params" in given else 0
    return model.generate(ids[:, seen:], max_new_tokens=3, do_sample=False, **given)[:, -3:]


@functools.cache
def wanted(family):
    """What the model says by itself."""
    return generated(tiny_model(family), LONGER)


PROMPT = torch.arange(100, 100 + 2 * BLOCK_TOKENS).unsqueeze(0)
LONGER = torch.cat([PROMPT, torch.arange(7, 12).unsqueeze(0)], dim=1)


@pytest.fixture
def store(tmp_path):
    with kvstow.Store(disk=tmp_path / "kv", disk_bytes="8MiB") as store:
        yield store


@pytest.mark.parametrize("family", ["llama", "gemma3_text", *RECURRENT])
def test_what_an_interrupted_pass_left_is_not_stored(store, family):
    model = tiny_model(family)
    memory = memory_for(model)
    for layer in range(model.config.num_hidden_layers):
        with (
            suppress(Interrupted),
            Cache(memory, tokens=PROMPT, store=store) as cache,
            interrupted_before(model, layer),
        ):
            one_pass(model, cache, PROMPT)
        assert len(memory.ledger) == 0
    for known in (memory, memory_for(model)):
        with Cache(known, tokens=LONGER, store=store) as cache:
            assert torch.equal(generated(model, LONGER, cache), wanted(family))


@pytest.mark.parametrize("family", RECURRENT)
def test_a_pass_that_is_the_last_one_is_stored_when_it_is_whole(store, family):
    model = tiny_model(family)
    with Cache(memory_for(model), tokens=PROMPT, store=store) as cache:
        one_pass(model, cache, PROMPT)
    with Cache(memory_for(model), tokens=LONGER, store=store) as cache:
        assert cache.found_tokens == PROMPT.shape[1]
        assert torch.equal(generated(model, LONGER, cache), wanted(family))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2", "minimax", "qwen3_next"])
def test_a_cache_does_not_go_on_after_a_pass_that_was_interrupted(store, family):
    model = tiny_model(family)
    last = model.config.num_hidden_layers - 1
    cache = Cache(memory_for(model), tokens=PROMPT, store=store)
    with suppress(Interrupted), interrupted_before(model, last):
        one_pass(model, cache, PROMPT)
    with pytest.raises(BlockError, match="interrupted"):
        one_pass(model, cache, PROMPT)
    cache.close()
    with Cache(memory_for(model), tokens=LONGER, store=store) as cache:
        assert torch.equal(generated(model, LONGER, cache), wanted(family))


def test_a_cache_goes_on_when_the_tokens_of_the_interrupted_pass_were_taken_back(store):
    model, family = tiny_model("llama"), "llama"
    with Cache(memory_for(model), tokens=PROMPT, store=store) as cache:
        one_pass(model, cache, PROMPT)
        more = LONGER[:, PROMPT.shape[1] :]
        with suppress(Interrupted), interrupted_before(model, 1):
            one_pass(model, cache, more)
        cache.crop(-more.shape[1])
        assert torch.equal(generated(model, LONGER, cache), wanted(family))


def test_a_cache_that_is_interrupted_while_its_prompt_is_loaded_holds_nothing(store, monkeypatch):
    model = tiny_model("llama")
    with Cache(memory_for(model), tokens=PROMPT, store=store) as cache:
        one_pass(model, cache, PROMPT)

    def interrupts(*_):
        raise KeyboardInterrupt

    with memory_for(model) as memory:
        free = memory.pool.num_free(0)
        with monkeypatch.context() as patched:
            patched.setattr(store, "load_rows", interrupts)
            with pytest.raises(KeyboardInterrupt):
                Cache(memory, tokens=LONGER, store=store)
        assert memory.pool.num_free(0) == free
        memory.ledger.check()
        with Cache(memory, tokens=LONGER, store=store) as cache:
            assert cache.num_tokens == PROMPT.shape[1]


def test_a_store_that_was_closed_costs_a_cache_nothing_but_what_it_would_have_found(tmp_path):
    model = tiny_model("llama")
    memory = memory_for(model)
    store = kvstow.Store(disk=tmp_path / "kv", disk_bytes="8MiB")
    with Cache(memory, tokens=PROMPT, store=store) as cache:
        one_pass(model, cache, PROMPT)
        store.close()
    assert len(memory.ledger) == 0
    with pytest.raises(StoreError, match="closed"):
        Cache(memory, tokens=PROMPT, store=store)


def test_a_medium_that_fails_costs_a_cache_nothing_but_what_it_would_have_found(store, monkeypatch):
    model, family = tiny_model("llama"), "llama"
    with Cache(memory_for(model), tokens=PROMPT, store=store) as cache:
        one_pass(model, cache, PROMPT)

    def failing(*_, **__):
        raise StoreError("index: disk I/O error")

    monkeypatch.setattr(store.disk, "contains", failing)
    with Cache(memory_for(model), tokens=LONGER, store=store) as cache:
        assert cache.found_tokens == 0
        assert torch.equal(generated(model, LONGER, cache), wanted(family))
