"""What a model is given is compared with what its cache was told; what is not plainly safe is
computed, and not reused."""

import copy
import re

import pytest
import torch
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvstow.adapters.transformers import Cache, ModelMemory
from kvstow.adapters.transformers.passes import why_not_reused
from kvstow.errors import BlockError, ModelError
from kvstow.testing.tiny_models import tiny_model

IDS = torch.arange(20, 40).unsqueeze(0)


def computed(model, memory, ids=IDS, **given):
    """One pass over a prompt whose tokens are known; how many were found, and its last logits."""
    with Cache(memory, tokens=IDS) as cache, torch.no_grad():
        found = cache.found_tokens
        return found, model(ids[:, found:], past_key_values=cache, **given).logits[:, -1]


# ── what the model is given ───────────────────────────────────────────────────────────


def padded(count):
    mask = torch.ones_like(IDS)
    mask[:, :count] = 0
    return mask


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (IDS + 1, r"sequence 0: the model is given 21 as token 0, .* told 20"),
        (torch.cat([IDS[:, :7], IDS], 1), r"the model is given 20 as token 7, .* told 27"),
        (IDS.repeat(2, 1), r"a cache of 1 sequences was given 2"),
    ],
    ids=["tokens", "again", "sequences"],
)
def test_a_pass_that_is_not_of_the_tokens_that_were_told_is_refused(model, memory, ids, reason):
    with pytest.raises(BlockError, match=rf"(?s){reason}.*hint: "):
        computed(model, memory, ids)
    assert computed(model, memory)[0] == 0  # nothing of it was kept


def test_a_cache_that_is_not_to_be_used_is_refused(model, memory):
    """`generate` gives whole prompts again and again then, and said something else."""
    given = {"use_cache": False, "max_new_tokens": 12, "do_sample": False}
    with Cache(memory) as cache, pytest.raises(BlockError, match=r"(?s)use_cache=False.*hint: "):
        model.generate(IDS, past_key_values=cache, **given)


UNLIKE_A_PROMPT = {
    "positions": {"position_ids": torch.arange(1, 21).unsqueeze(0)},
    "padding": {"attention_mask": padded(3)},
    "own mask": {"attention_mask": torch.zeros(1, 1, 20, 20)},
}


@pytest.mark.parametrize("given", UNLIKE_A_PROMPT.values(), ids=UNLIKE_A_PROMPT)
def test_a_pass_that_is_not_as_in_a_prompt_is_computed_and_not_reused(model, memory, given, caplog):
    with torch.no_grad():
        wanted = model(IDS, **given).logits[:, -1]
    for _ in range(2):
        found, logits = computed(model, memory, **given)
        assert found == 0
        assert torch.allclose(logits, wanted, atol=1e-4)
    assert caplog.text.count("computed and not reused") == 2
    assert [computed(model, memory)[0] for _ in range(2)] == [0, 16]
    rest = {name: value[..., 16:] for name, value in given.items()}
    with pytest.raises(BlockError, match=r"(?s)16 of 20 tokens are here as in a prompt.*hint: "):
        computed(model, memory, **rest)


def test_embeddings_are_not_taken_for_those_of_the_tokens(model, memory):
    for _ in range(2):
        with Cache(memory, tokens=IDS) as cache:
            assert cache.found_tokens == 0
            model(inputs_embeds=model.model.embed_tokens(IDS) * 2, past_key_values=cache)


def test_positions_behind_padding_are_those_of_generate(model, memory):
    mask = padded(3)
    with Cache(memory, tokens=IDS, attention_mask=mask) as cache:
        model.generate(IDS, attention_mask=mask, past_key_values=cache, max_new_tokens=1)
    for given, reason in (
        ({"attention_mask": mask}, "positions"),
        ({}, r"\[3\] tokens, .* no mask"),
    ):
        with (
            Cache(memory, tokens=IDS, attention_mask=mask) as cache,
            pytest.raises(BlockError, match=rf"(?s){reason}.*hint: "),
        ):
            model(IDS[:, 16:], past_key_values=cache, **given)


def test_the_rest_of_a_prompt_and_more_may_come_in_one_pass_behind_what_was_found(model, memory):
    """As where a prefill was lost, and decode computes what did not arrive."""
    more = torch.cat([IDS, torch.arange(50, 55).unsqueeze(0)], 1)
    computed(model, memory)
    with Cache(memory, tokens=IDS) as cache, torch.no_grad():
        assert cache.found_tokens == 16
        logits = model(more[:, 16:], past_key_values=cache).logits[:, -1]
    assert torch.allclose(logits, model(more).logits[:, -1], atol=1e-4)


def test_another_model_does_not_fill_the_cache_of_this_one(model, memory):
    other = tiny_model("llama")
    for each in (other, copy.deepcopy(model)):
        with Cache(memory, tokens=IDS) as cache:
            each(IDS, past_key_values=cache)
    assert computed(model, memory)[0] == 0
    with Cache(memory, tokens=IDS) as cache, pytest.raises(BlockError, match="another model"):
        other(IDS[:, 16:], past_key_values=cache)


def test_a_part_of_the_model_may_be_called_and_what_it_computes_is_not_reused(model, memory):
    with torch.no_grad():
        for _ in range(2):
            with Cache(memory, tokens=IDS) as cache:
                assert cache.found_tokens == 0
                for part in IDS.split(7, dim=1):
                    last = model.model(part, past_key_values=cache).last_hidden_state[:, -1]
            assert torch.allclose(last, model.model(IDS).last_hidden_state[:, -1], atol=1e-4)


def test_states_do_not_change_in_a_pass_of_a_part_of_the_model():
    model = tiny_model("falcon_h1")
    with (
        Cache(model, memory="2MiB") as cache,
        pytest.raises(BlockError, match=r"(?s)no model has announced.*hint: call the model"),
    ):
        model.model(IDS, past_key_values=cache)


def test_a_memory_that_is_closed_leaves_no_hook_behind(model):
    with ModelMemory.of(model, budget="1MiB"):
        assert model._forward_pre_hooks
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())


# ── what the model is ─────────────────────────────────────────────────────────────────


def optimized(model):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight += 0.1


def in_training(model):
    model.train()


@pytest.mark.parametrize(("change", "what"), [(optimized, "weights"), (in_training, "mode")])
def test_a_model_that_has_changed_since_finds_and_keeps_nothing(model, memory, change, what):
    computed(model, memory)
    with Cache(memory) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        change(model)
        with pytest.raises(ModelError, match=rf"(?s)other .*{what}.*hint: make another"):
            cache.blocks(0)
    for _ in range(2):
        found, logits = computed(model, memory)
        assert found == 0
        assert torch.allclose(logits, model(IDS).logits[:, -1], atol=1e-4)


def test_a_model_whose_change_was_taken_back_goes_on(model, memory):
    first = computed(model, memory)
    model.train().eval()
    model.set_attn_implementation("eager")
    again = computed(model, memory)
    assert again[0] == 16
    assert torch.allclose(again[1], first[1], rtol=1e-3, atol=1e-3)


# ── answers ───────────────────────────────────────────────────────────────────────────


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


UNLIKE_AN_ANSWER = {
    "positions": {"position_ids": torch.arange(4).unsqueeze(0)},
    "mask": {"attention_mask": (torch.arange(24) > 2).long().unsqueeze(0)},
}


@pytest.mark.parametrize("given", UNLIKE_AN_ANSWER.values(), ids=UNLIKE_AN_ANSWER)
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


# ── models that are not plainly safe ──────────────────────────────────────────────────


def hooked(model):
    model.model.layers[1].register_forward_hook(lambda *_: None)


def own_attention(model):
    AttentionInterface.register(
        "own", lambda *given, **more: sdpa_attention_forward(*given, **more)
    )
    model.set_attn_implementation("own")


class OwnModel(LlamaForCausalLM):
    """A model whose class is in a file of the user's."""


def own_class(model):
    model.__class__ = OwnModel


def long_rope(model):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    length = {"original_max_position_embeddings": 64}
    model.config.rope_parameters |= {"rope_type": "longrope"} | factors | length


def training(model):
    model.train()


NOT_PLAINLY_SAFE = {
    hooked: r"a hook on model\.layers\.1",
    own_attention: "the attention 'own'",
    own_class: "the class OwnModel",
    long_rope: r"rope \(longrope\) follows the length",
    training: "in training",
}


@pytest.mark.parametrize(("change", "reason"), NOT_PLAINLY_SAFE.items())
def test_what_is_not_plainly_safe_is_computed_and_not_reused(model, change, reason, caplog):
    change(model)
    with ModelMemory.of(model, budget="1MiB", block_tokens=4) as memory, torch.no_grad():
        for _ in range(2):
            with Cache(memory, tokens=IDS) as cache:
                assert cache.found_tokens == 0
                model(IDS, past_key_values=cache)
    (record,) = caplog.records  # said once
    assert re.search(f"computed and not reused: .*{reason}", record.message)


def test_a_plain_model_has_no_reason():
    assert why_not_reused(tiny_model("gemma3_text"), has_states=False, is_vouched=False) == ""


@pytest.mark.parametrize("change", [hooked, own_attention, own_class])
def test_whoever_gives_an_identity_vouches_for_code_of_their_own(model, change):
    change(model)
    assert why_not_reused(model, has_states=False, is_vouched=True) == ""
