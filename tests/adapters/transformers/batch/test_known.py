"""Which tokens are known, and passes that are not of these tokens."""

import pytest
import torch

from kvstow.adapters.transformers import Cache, ModelMemory
from kvstow.errors import BlockError
from kvstow.testing.tiny_models import tiny_model

IDS = torch.arange(20, 40).unsqueeze(0)


def forward(model, ids, cache):
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


def test_an_answer_is_a_prefix_of_the_next_prompt(model, memory):
    with Cache(memory, tokens=IDS) as cache:
        answer = model.generate(IDS, past_key_values=cache, max_new_tokens=9, do_sample=False)
    with Cache(memory, tokens=torch.cat([answer, IDS], 1)) as cache:
        assert cache.found_tokens == 28  # 29 tokens, the last of which was never computed


def test_the_answers_of_beams_are_found_as_they_were_computed(model, memory):
    whole = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12, "do_sample": False}
    with Cache(memory, tokens=IDS.repeat(3, 1)) as cache:
        answers = model.generate(IDS, past_key_values=cache, **whole)
    for answer in answers.unsqueeze(1):
        with Cache(memory, tokens=answer) as cache, torch.no_grad():
            assert cache.found_tokens >= 20
            rest = forward(model, answer[:, cache.found_tokens :], cache)
        assert torch.allclose(rest[:, -1], model(answer).logits[:, -1], atol=1e-4)


def test_a_prompt_that_comes_again_behind_a_found_prefix_is_refused():
    """As in assisted generation, which computes whole prompts whatever the cache holds."""
    model = tiny_model("llama")
    ids = torch.arange(10).repeat(1, 3)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        for found in (0, 28):
            with Cache(memory, tokens=ids) as cache:
                assert cache.found_tokens == found
                given = {"max_new_tokens": 6, "do_sample": False, "prompt_lookup_num_tokens": 5}
                if not found:
                    model.generate(ids, past_key_values=cache, **given)
                    continue
                with pytest.raises(BlockError, match=r"(?s)given 0 as token 28, .* told 8.*hint"):
                    model.generate(ids, past_key_values=cache, **given)
        with Cache(memory, tokens=ids) as cache:  # what was refused has left nothing behind
            rest = forward(model, ids[:, cache.found_tokens :], cache)
        assert torch.allclose(rest[:, -1], model(ids).logits[:, -1], atol=1e-4)


def test_tokens_that_were_taken_back_are_not_those_that_count(model, memory):
    with Cache(memory, tokens=IDS[:, :8]) as cache, torch.no_grad():
        model(IDS[:, :8], past_key_values=cache)
        model(IDS[:, :4], past_key_values=cache)
        cache.crop(-4)
        model(IDS[:, 8:16], past_key_values=cache)
    with Cache(memory, tokens=IDS) as cache:
        assert cache.found_tokens == 16


UNLIKE_A_PROMPT = {
    "positions": {"position_ids": torch.arange(4).unsqueeze(0)},
    "mask": {"attention_mask": (torch.arange(24) > 2).long().unsqueeze(0)},
}


@pytest.mark.parametrize("given", UNLIKE_A_PROMPT.values(), ids=UNLIKE_A_PROMPT)
def test_an_answer_that_was_not_given_as_in_a_prompt_is_not_found(model, memory, given):
    more = torch.arange(50, 54).unsqueeze(0)
    with Cache(memory, tokens=IDS) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        model(more, past_key_values=cache, **given)
        model(more, past_key_values=cache)
    with Cache(memory, tokens=torch.cat([IDS, more, more, IDS], 1)) as cache:
        assert cache.found_tokens == 20


def test_tokens_behind_some_that_nobody_named_are_not_found(model, memory):
    with Cache(memory, tokens=IDS[:, :8]) as cache, torch.no_grad():
        model(IDS[:, :12], past_key_values=cache)
        model(inputs_embeds=torch.ones(1, 2, 32), past_key_values=cache)
        model(IDS[:, 12:], past_key_values=cache)
    with Cache(memory, tokens=IDS) as cache:
        assert cache.found_tokens == 8


def test_an_answer_of_a_model_that_has_changed_is_not_found(model, memory):
    with Cache(memory, tokens=IDS) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        model.train()
        model(IDS, past_key_values=cache)
        model.eval()
    with Cache(memory, tokens=IDS.repeat(1, 3)) as cache:
        assert cache.found_tokens == 20
