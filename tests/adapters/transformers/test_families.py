"""Every family generates the same, to the bit, from kvstow rows as from its own cache."""

import functools
from copy import deepcopy as copied
from itertools import cycle

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxForCausalLM

from kvstow.adapters.transformers import Cache, ModelMemory, cache_name
from kvstow.demo.weights import load_checkpoint
from kvstow.memory.copy import copy
from kvstow.plan.layout import ORDERS
from kvstow.route.route import plan_route
from kvstow.testing.tiny_models import FAMILIES, tiny_model

BLOCK_TOKENS = 4
NEW_TOKENS = 10
PROMPT_TOKENS = 30  # longer than every window

BEGIN_ANEW = {"jamba", "bamba"}  # given several tokens, these forget the state they had


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family)


def memory_for(model: PreTrainedModel, **wishes) -> ModelMemory:
    return ModelMemory.of(model, budget=2 << 20, block_tokens=BLOCK_TOKENS, **wishes)


def prompt(batch: int, tokens: int = PROMPT_TOKENS, *, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (batch, tokens), generator=generator)


def generated(model, ids, cache=None, mask=None, num_tokens=NEW_TOKENS, **wishes):
    given = {} if cache is None else {cache_name(model): cache}
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **given,
        **wishes,
    )


def in_chunks(model, ids, cache, chunk):
    """As `generated`, the prompt in chunks; by hand where `generate` cannot."""
    cache = own_cache(model) if cache is None else cache
    if cache_name(model) == "past_key_values":
        return generated(model, ids, cache, prefill_chunk_size=chunk)
    last = (ids.shape[1] - 1) // chunk * chunk
    computed(model, ids[:, :last], cache, chunk)
    return generated(model, ids[:, last:], cache)


def computed(model, ids, cache, chunk):
    """The cache, with tokens computed in chunks."""
    with torch.no_grad():
        for part in ids.split(chunk, dim=1) if ids.shape[1] else ():
            model(part, use_cache=True, **{cache_name(model): cache})
    return cache


def own_cache(model):
    minimax = model.config.model_type == "minimax"
    return MiniMaxCache() if minimax else DynamicCache(config=model.config)


@pytest.fixture
def whole_reorder(monkeypatch):
    """Let transformers' own caches reorder all that they keep for a beam, which two do not."""

    def compressed(layer, beams):
        CacheLayerMixin.reorder_cache(layer, beams)
        for kept in ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate"):
            for name, tensor in getattr(layer, kept, {}).items():
                getattr(layer, kept)[name] = None if tensor is None else tensor[beams]

    def lightning(cache, beams):
        DynamicCache.reorder_cache(cache, beams)
        cache.linear_cache = [x[beams] if len(x) else x for x in cache.linear_cache]

    monkeypatch.setattr(DeepseekV4HCACache, "reorder_cache", compressed)
    monkeypatch.setattr(MiniMaxCache, "reorder_cache", lightning)


def unseen(model, ids, num_tokens):
    """What `generate` is to be given: it leaves out what a cache has seen, mostly."""
    return ids if cache_name(model) == "past_key_values" else ids[:, num_tokens:]


def assert_same_bits(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.logits) == len(theirs.logits)
    for mine, other in zip(ours.logits, theirs.logits, strict=True):
        assert torch.equal(mine, other)


families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_a_left_padded_batch_has_the_same_logits(family):
    model = model_of(family)
    ids = prompt(3)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    mask[2, :1] = 0
    with memory_for(model) as memory:
        with Cache(memory) as cache:
            ours = generated(model, ids, cache, mask)
        assert len(memory.ledger) == 0
        memory.ledger.check()
    assert_same_bits(ours, generated(model, ids, mask=mask))


@families
@pytest.mark.usefixtures("whole_reorder")
def test_beams_that_share_rows_have_the_same_logits(family):
    model = model_of(family)
    ids = prompt(2)
    with memory_for(model) as memory:
        with Cache(memory) as cache:
            ours = generated(model, ids, cache, num_beams=3)
        memory.ledger.check()
        assert all(memory.pool.num_held(g) == 0 for g in range(len(memory.layout.groups)))
    assert_same_bits(ours, generated(model, ids, num_beams=3))


@families
def test_a_prompt_in_chunks_has_the_same_logits(family):
    model = model_of(family)
    ids = prompt(2)
    with memory_for(model) as memory, Cache(memory) as cache:
        ours = in_chunks(model, ids, cache, 7)
    assert_same_bits(ours, in_chunks(model, ids, None, 7))


OTHER_ORDERS = [order for order in ORDERS if order != "BLHNC"]


@pytest.mark.parametrize(
    ("family", "order"), list(zip(FAMILIES, cycle(OTHER_ORDERS), strict=False))
)
def test_other_orders_have_the_same_logits(family, order):
    model = model_of(family)
    ids = prompt(2)
    with memory_for(model, order=order) as memory, Cache(memory) as cache:
        ours = generated(model, ids, cache)
    assert_same_bits(ours, generated(model, ids))


@families
def test_a_second_turn_goes_on_from_the_same_cache(family):
    model = model_of(family)
    first, more = prompt(2), prompt(2, 1, seed=2)
    with memory_for(model) as memory, Cache(memory) as cache:
        said = generated(model, first, cache).sequences
        assert cache.get_seq_length() == said.shape[1] - 1
        both = torch.cat([said, more], 1)
        ours = generated(model, unseen(model, both, cache.get_seq_length()), cache)
    before = generated(model, first)
    both = torch.cat([before.sequences, more], 1)
    theirs = generated(model, unseen(model, both, said.shape[1] - 1), before.past_key_values)
    assert_same_bits(ours, theirs)


@families
def test_a_shared_beginning_is_not_computed_again(family):
    model = model_of(family)
    first = prompt(1, 36)
    second = torch.cat([first[:, :26], prompt(1, 9, seed=3)], 1)
    with memory_for(model) as memory:
        with Cache(memory, tokens=first) as cache:
            assert cache.get_seq_length() == 0
            in_chunks(model, first, cache, 8)
        with Cache(memory, tokens=second) as cache:
            hit = cache.get_seq_length()
            ours = generated(model, unseen(model, second, hit), cache)
        memory.ledger.check()
    assert hit == (0 if family in BEGIN_ANEW else 24)
    cache = computed(model, second[:, :hit], own_cache(model), 8)
    assert_same_bits(ours, generated(model, unseen(model, second, hit), cache))


@families
def test_rows_that_came_from_elsewhere_go_on_with_the_same_logits(family):
    model = model_of(family)
    ids = prompt(1, PROMPT_TOKENS + 1)
    there = ModelMemory.of(model, budget=2 << 20, block_tokens=2 * BLOCK_TOKENS, order="BHLNC")
    with memory_for(model) as here, there:
        with Cache(here) as cache:
            computed(model, ids[:, :-1], cache, PROMPT_TOKENS)
            request = there.ledger.admit(PROMPT_TOKENS).request
            moves = plan_route(here.layout, there.layout).copies(
                cache.blocks(0), there.ledger.blocks(request), PROMPT_TOKENS
            )
            copy(here.arena, there.arena, moves).wait()
        with Cache(there, requests=[request]) as cache:
            ours = generated(model, unseen(model, ids, PROMPT_TOKENS), cache)
    cache = computed(model, ids[:, :-1], own_cache(model), PROMPT_TOKENS)
    assert_same_bits(ours, generated(model, unseen(model, ids, PROMPT_TOKENS), cache))


CROPPED = ["llama", "mistral", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v32"]


@pytest.mark.parametrize("candidates", ["copied", "guessed"])
@pytest.mark.parametrize("family", CROPPED)
def test_candidates_that_are_taken_back_leave_no_trace(family, candidates):
    model = model_of(family)
    ids = prompt(1, 10).repeat(1, 3)
    wishes = {"prompt_lookup_num_tokens": 5}
    if candidates == "guessed":
        wishes = {"assistant_model": nearly(family), "num_assistant_tokens": 5}
    with memory_for(model, rollback_tokens=20) as memory, Cache(memory) as cache:
        ours = generated(model, ids, cache, **wishes)
        assert cache.is_croppable
        memory.ledger.check()
    assert_same_bits(ours, generated(model, ids, **wishes))
    assert torch.equal(ours.sequences, generated(model, ids).sequences)


def nearly(family):
    """A model that guesses right now and then."""
    model = tiny_model(family)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01 * weight.std() * torch.randn(weight.shape, generator=noise)
    return model


@pytest.mark.parametrize("block_tokens", [1, 6, 16])
def test_compressed_entries_are_the_same_in_blocks_of_any_size(block_tokens):
    model = tiny_model("deepseek_v4").to(torch.bfloat16)
    ids = prompt(2)
    memory = ModelMemory.of(model, budget=4 << 20, block_tokens=block_tokens)
    with memory, Cache(memory) as cache:
        ours = in_chunks(model, ids, cache, 7)
    assert_same_bits(ours, in_chunks(model, ids, None, 7))


def test_lightning_attention_in_the_first_layer_is_right_behind_padding():
    config = copied(model_of("minimax").config)
    config.layer_types = ["linear_attention", "linear_attention", "full_attention"] * 2
    config.num_hidden_layers = 6
    torch.manual_seed(0)
    model = MiniMaxForCausalLM(config).eval()
    ids = prompt(2)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with memory_for(model) as memory, Cache(memory) as cache:
        ours = generated(model, ids, cache, mask)
    assert torch.equal(ours.sequences, generated(model, ids, mask=mask, use_cache=False).sequences)


def test_real_weights_have_the_same_logits():
    loaded = load_checkpoint("smollm2")
    model, tokenizer = loaded.model, loaded.tokenizer
    tokenizer.padding_side = "left"
    asked = tokenizer(
        ["The capital of France is", "One, two, three, four, five, six, seven, eight,"],
        return_tensors="pt",
        padding=True,
    )
    assert (asked.attention_mask == 0).any()
    with (
        ModelMemory.of(model, budget=32 << 20, block_tokens=4) as memory,
        Cache(memory) as cache,
    ):
        ours = generated(model, asked.input_ids, cache, asked.attention_mask, num_tokens=4)
    alone = generated(model, asked.input_ids, mask=asked.attention_mask, num_tokens=4)
    assert_same_bits(ours, alone)
    assert " Paris." in tokenizer.decode(ours.sequences[0])
