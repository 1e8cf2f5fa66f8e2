"""Ropes that follow a sequence's length: prefixes are found where their keys are turned alike."""

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import kvstow
from kvstow.adapters.transformers import Cache, ModelMemory
from kvstow.errors import BlockError
from kvstow.testing.tiny_models import tiny_model

TRAINED = 32
"""The length that the models were first trained for."""

LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 3.0, 2.5, 2.0],
    "original_max_position_embeddings": TRAINED,
}


def model_of(kind, family="llama"):
    given = tiny_model(family).config.to_dict()
    rope = LONG if kind == "longrope" else {"rope_type": "dynamic", "factor": 4.0}
    given |= {
        "max_position_embeddings": 8 * TRAINED if kind == "longrope" else TRAINED,
        "original_max_position_embeddings": TRAINED,
        "rope_parameters": {"rope_theta": 100.0, **rope},
        "sliding_window": None,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    return AutoModelForCausalLM.from_config(config).eval()


def prompt(num_tokens, seed=0):
    """Prompts that are equal but for their last tokens."""
    own = torch.randint(0, 250, (2,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.arange(20, 18 + num_tokens), own]).unsqueeze(0)


def memory_of(model):
    return ModelMemory.of(model, budget="2MiB", block_tokens=4)


def kept(model, memory, ids, **given):
    """The cache after one pass over what was not found: its keys and values of every layer."""
    with Cache(memory, tokens=ids, **given) as cache, torch.no_grad():
        found = cache.found_tokens
        model(ids[:, found:], past_key_values=cache)
        return found, [(layer.keys, layer.values) for layer in cache.layers]


def own_rows(model, ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :1])  # dynamic: the longest sequence so far decides, so begin with a short one
        model(ids, past_key_values=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize(("kind", "family"), [("longrope", "phi3"), ("dynamic", "llama")])
def test_rows_are_those_of_the_models_own_cache_whatever_was_found_before(kind, family):
    model = model_of(kind, family)
    choice, most = random.Random(1), {True: 0, False: 0}
    lengths = (5, 12, 28, TRAINED - 2, TRAINED - 1, TRAINED, TRAINED + 1, TRAINED + 2, 40, 50)
    with memory_of(model) as memory:
        for turn in range(20):
            ids = prompt(choice.choice(lengths), turn)
            wanted = own_rows(model, ids)
            model(ids[:, :1])
            found, got = kept(model, memory, ids)
            is_long = ids.shape[1] > TRAINED
            most[is_long] = max(most[is_long], found)
            for ours, theirs in zip(got, wanted, strict=True):
                assert all(map(_close, ours, theirs)), (ids.shape, found)
    assert most[False] >= 28
    assert most[True] == (0 if kind == "dynamic" else 48)


def _close(ours, theirs):
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_an_answer_that_grows_past_the_switch_leaves_only_what_was_before_it(kind):
    model = model_of(kind)
    ids = prompt(TRAINED - 6)
    with memory_of(model) as memory:
        with Cache(memory, tokens=ids) as cache:
            given = {"max_new_tokens": 20, "do_sample": False}
            answer = model.generate(ids, past_key_values=cache, **given)
            cache.remember(answer)
        assert torch.equal(answer, model.generate(ids, **given))
        shorter, longer = answer[:, : TRAINED - 1], answer[:, : TRAINED + 9]
        assert kept(model, memory, shorter)[0] == 28
        assert kept(model, memory, longer)[0] == 0  # it needs the other rope from its first token


def test_several_tokens_across_the_switch_are_not_those_of_a_short_sequence():
    """As in assisted generation: a pass that ends behind it turns all of its keys alike."""
    model = model_of("longrope")
    ids = prompt(48)
    with memory_of(model) as memory:
        with Cache(memory, tokens=ids[:, :24]) as cache, torch.no_grad():
            model(ids[:, :24], past_key_values=cache)
            model(ids[:, 24:36], past_key_values=cache)
            cache.crop(-5)
            cache.remember(ids[:, :31])
        found, got = kept(model, memory, ids[:, :31])
        assert found == 24
        assert _close(got[1][0], own_rows(model, ids[:, :31])[1][0])


def test_a_long_prompt_in_chunks_is_of_no_kind():
    model = model_of("longrope")
    ids = prompt(48)
    with memory_of(model) as memory:
        with Cache(memory, tokens=ids) as cache:
            given = {"prefill_chunk_size": 16, "max_new_tokens": 5, "do_sample": False}
            answer = model.generate(ids, past_key_values=cache, **given)
            cache.remember(answer)
        assert torch.equal(answer, model.generate(ids, **given))
        assert [kept(model, memory, ids[:, :length])[0] for length in (30, 40)] == [0, 0]


def test_a_chunk_does_not_go_on_from_rows_of_the_other_rope():
    model = model_of("longrope")
    ids = prompt(48)
    with memory_of(model) as memory:
        kept(model, memory, torch.cat([ids[:, :24], prompt(20)], 1))
        with (
            Cache(memory, tokens=ids) as cache,
            pytest.raises(BlockError, match=r"(?s)24 of 48 tokens.*ends at 28.*hint: .*one pass"),
        ):
            model(ids[:, 24:28], past_key_values=cache)


def test_a_prompt_and_more_in_one_pass_across_the_switch_is_not_kept():
    model = model_of("longrope")
    ids = prompt(48)
    with memory_of(model) as memory:
        with Cache(memory, tokens=ids[:, :24]) as cache, torch.no_grad():
            model(ids[:, :40], past_key_values=cache)
        assert kept(model, memory, ids[:, :24])[0] == 0


def test_a_store_keeps_the_two_kinds_apart(tmp_path):
    model = model_of("longrope")
    for ids, found in ((prompt(30), 0), (prompt(50), 0), (prompt(30, 1), 28), (prompt(50, 1), 48)):
        with (
            kvstow.Store(disk=tmp_path, disk_bytes="8MiB") as store,
            memory_of(model) as memory,
        ):
            here, got = kept(model, memory, ids, store=store)
            assert here == found
            for ours, theirs in zip(got, own_rows(model, ids), strict=True):
                assert all(map(_close, ours, theirs))


def test_prompts_behind_padding_share_nothing_where_the_longest_one_decides():
    model = model_of("longrope")
    ids = prompt(30)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    with memory_of(model) as memory:
        for _ in range(2):
            with Cache(memory, tokens=ids, attention_mask=mask) as cache:
                assert cache.found_tokens == 0
                given = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
                answer = model.generate(ids, past_key_values=cache, **given)
                cache.remember(answer)
            assert torch.equal(answer, model.generate(ids, **given))


def test_a_rope_whose_rule_is_not_known_finds_no_prefixes():
    model = model_of("longrope")

    class Foreign(type(model.model.rotary_emb)):
        """As of remote code."""

    model.model.rotary_emb.__class__ = Foreign
    with memory_of(model) as memory:
        assert [kept(model, memory, prompt(30))[0] for _ in range(2)] == [0, 0]
