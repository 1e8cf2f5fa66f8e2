"""Which tokens are known: what `remember` takes, and passes that are not of these tokens."""

import pytest
import torch

from kvstow.adapters.transformers import Cache, ModelMemory
from kvstow.errors import BlockError, ModelError
from kvstow.testing.tiny_models import tiny_model

IDS = torch.arange(20, 40).unsqueeze(0)


def forward(model, ids, cache):
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


def test_sequences_without_tokens_cannot_be_remembered():
    model = tiny_model("llama")
    with ModelMemory.of(model, budget=1 << 20) as memory, Cache(memory) as cache:
        forward(model, torch.zeros((1, 3), dtype=torch.long), cache)
        with pytest.raises(BlockError, match="tokens=input_ids"):
            cache.remember(torch.zeros((1, 3), dtype=torch.long))


def test_a_remembered_answer_is_a_prefix_of_the_next_prompt():
    model = tiny_model("llama")
    ids = torch.arange(20).unsqueeze(0)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory, tokens=ids) as cache:
            answer = model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
            cache.remember(answer)
        with Cache(memory, tokens=torch.cat([answer, ids], 1)) as cache:
            assert cache.get_seq_length() == 28  # 29 tokens, the last of which was never computed


# ── tokens that are not those of the rows ─────────────────────────────────────────────


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (lambda answer: answer[:, 8:], "do not begin like|tokens for sequences"),
        (lambda answer: answer.flip(1), "do not begin like"),
        (lambda answer: answer[:, :12], "12 tokens for sequences that hold 31"),
        (lambda answer: answer[0], r"1 sequences, tokens are \(32,\)"),
        (lambda answer: answer.repeat(2, 1), r"1 sequences, tokens are \(2, 32\)"),
    ],
    ids=["answer alone", "other prompt", "too few", "no batch", "another batch"],
)
def test_tokens_that_cannot_be_those_of_the_rows_are_not_remembered(told, reason):
    model = tiny_model("llama")
    ids = torch.arange(20, 28).unsqueeze(0)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory, tokens=ids) as cache:
            answer = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
            with pytest.raises(BlockError, match=reason):
                cache.remember(told(answer))
        with Cache(memory, tokens=answer) as cache:
            assert cache.found_tokens == 8  # the prompt, and nothing of what was told


def test_the_answers_of_a_beam_search_are_not_taken_for_the_rows_of_its_beams():
    model = tiny_model("llama")
    ids = torch.arange(20, 40).unsqueeze(0)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory, tokens=ids.repeat(3, 1)) as cache:
            answers = model.generate(
                ids,
                past_key_values=cache,
                num_beams=3,
                num_return_sequences=3,
                max_new_tokens=12,
                do_sample=False,
            )
            with pytest.raises(BlockError, match=r"(?s)beams cannot be remembered.*hint"):
                cache.remember(answers)
        for answer in answers.unsqueeze(1):
            with Cache(memory, tokens=answer) as cache:
                assert cache.found_tokens == 20


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


def test_an_answer_that_the_model_did_not_compute_is_not_remembered(model, memory):
    with Cache(memory, tokens=IDS) as cache:
        answer = model.generate(IDS, past_key_values=cache, max_new_tokens=9, do_sample=False)
        other = answer.clone()
        other[0, 24] += 1
        with pytest.raises(BlockError, match="tokens from 20 on are not those that the model"):
            cache.remember(other)
        cache.remember(answer)
    with Cache(memory, tokens=answer) as cache:
        assert cache.found_tokens == 28


def test_tokens_that_were_taken_back_are_not_those_that_count(model, memory):
    with Cache(memory, tokens=IDS[:, :8]) as cache, torch.no_grad():
        model(IDS[:, :8], past_key_values=cache)
        model(IDS[:, :4], past_key_values=cache)
        cache.crop(-4)
        model(IDS[:, 8:16], past_key_values=cache)
        cache.remember(IDS[:, :16])
    with Cache(memory, tokens=IDS) as cache:
        assert cache.found_tokens == 16


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"position_ids": torch.arange(4).unsqueeze(0)}, "not at their own positions"),
        ({"attention_mask": (torch.arange(24) > 2).long().unsqueeze(0)}, "hides more or less"),
    ],
    ids=["positions", "mask"],
)
def test_an_answer_that_was_not_given_as_in_a_prompt_is_not_remembered(
    model, memory, given, reason
):
    more = torch.arange(50, 54).unsqueeze(0)
    with Cache(memory, tokens=IDS) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        model(more, past_key_values=cache, **given)
        with pytest.raises(BlockError, match=rf"(?s)tokens from 20 on are not .*{reason}.*hint: "):
            cache.remember(torch.cat([IDS, more], 1))
    with Cache(memory, tokens=torch.cat([IDS, more, IDS], 1)) as cache:
        assert cache.found_tokens == 20


def test_an_answer_of_a_model_that_has_changed_is_not_remembered(model, memory):
    with Cache(memory, tokens=IDS) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        model.model.layers[2].self_attn.v_proj.weight.data += 0.1
        model(IDS, past_key_values=cache)
        with pytest.raises(ModelError, match=r"(?s)other weights than.*hint: make another"):
            cache.remember(IDS.repeat(1, 2))
