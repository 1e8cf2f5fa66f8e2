"""A model that is given other tokens than its cache was told, or that has changed, is refused."""

import copy

import pytest
import torch

from kvstow.adapters.transformers import Cache, ModelMemory, model_identity
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
    ("given", "reason"),
    [
        ({"ids": IDS + 1}, r"sequence 0: the model is given 21 as token 0, .* told 20"),
        ({"ids": IDS.repeat(2, 1)}, r"a cache of 1 sequences was given 2"),
        ({"position_ids": torch.arange(1, 21).unsqueeze(0)}, r"positions.*given \[\[1, 2"),
        ({"attention_mask": padded(3)}, r"padding of \[0\] tokens.*hides other ones"),
        ({"attention_mask": torch.zeros(1, 1, 20, 20)}, r"given a mask \(1, 1, 20, 20\)"),
        ({"attention_mask": padded(0)[:, :19]}, r"given a mask \(1, 19\)"),
    ],
    ids=["tokens", "sequences", "positions", "padding", "own mask", "short mask"],
)
def test_a_pass_that_is_not_of_the_tokens_that_were_told_is_refused(model, memory, given, reason):
    with pytest.raises(BlockError, match=rf"(?s){reason}.*hint: "):
        computed(model, memory, **given)
    assert computed(model, memory)[0] == 0  # nothing of it was kept


def test_embeddings_are_not_taken_for_those_of_the_tokens(model, memory):
    with (
        Cache(memory, tokens=IDS) as cache,
        pytest.raises(BlockError, match=r"(?s)embeddings, not tokens.*hint: leave tokens out"),
    ):
        model(inputs_embeds=model.model.embed_tokens(IDS) * 2, past_key_values=cache)
    with Cache(memory) as cache:
        model(inputs_embeds=model.model.embed_tokens(IDS), past_key_values=cache)


def test_positions_behind_padding_are_those_of_generate(model, memory):
    mask = padded(3)
    with Cache(memory, tokens=IDS, attention_mask=mask) as cache:
        model.generate(IDS, attention_mask=mask, past_key_values=cache, max_new_tokens=1)
    with (
        Cache(memory, tokens=IDS, attention_mask=mask) as cache,
        pytest.raises(BlockError, match=r"(?s)no position_ids, so padding counts.*hint: "),
    ):
        model(IDS[:, 16:], attention_mask=mask, past_key_values=cache)
    with (
        Cache(memory, tokens=IDS, attention_mask=mask) as cache,
        pytest.raises(BlockError, match=r"padding of \[3\] tokens, the model is given no mask"),
    ):
        model(IDS[:, 16:], past_key_values=cache)


def test_what_comes_behind_the_known_tokens_is_free(model, memory):
    with Cache(memory, tokens=IDS[:, :8]) as cache:
        model(IDS[:, :12], past_key_values=cache)
        model(inputs_embeds=torch.ones(1, 2, 32), past_key_values=cache)
        with pytest.raises(
            BlockError,
            match=r"(?s)tokens from 8 on are not those.*: the model is given embeddings.*hint",
        ):
            cache.remember(IDS)


def test_generate_without_a_cache_does_not_append_its_tokens_again_and_again(model, memory):
    """As it does to transformers' own caches, and chooses other tokens then."""
    for tokens in (None, IDS):
        with (
            Cache(memory, tokens=tokens) as cache,
            pytest.raises(BlockError, match=r"(?s)holds 20 .*given 21 from position 0.*hint: "),
        ):
            model.generate(IDS, past_key_values=cache, use_cache=False, max_new_tokens=3)
    with Cache(memory) as cache:  # a pass that goes on may be told so
        model(IDS, past_key_values=cache, use_cache=False)
        model(IDS, past_key_values=cache, use_cache=False)
        assert cache.num_tokens == 40


def test_another_model_does_not_fill_the_cache_of_this_one(model, memory):
    other = tiny_model("llama")
    for each in (other, copy.deepcopy(model)):
        with Cache(memory, tokens=IDS) as cache, pytest.raises(BlockError, match="another model"):
            each(IDS, past_key_values=cache)
    with Cache(memory) as cache:  # nobody says which tokens these are
        other(IDS, past_key_values=cache)


def test_the_model_inside_a_model_may_be_called_itself(model, memory):
    with Cache(memory, tokens=IDS) as cache:
        model.model(IDS, past_key_values=cache)
    assert computed(model, memory)[0] == 16
    with Cache(memory, tokens=IDS) as cache, pytest.raises(BlockError, match="positions"):
        model.model(IDS[:, 16:], position_ids=torch.zeros(1, 4).long(), past_key_values=cache)


def test_a_memory_that_is_closed_leaves_no_hook_behind(model):
    with ModelMemory.of(model, budget="1MiB"):
        assert model._forward_pre_hooks
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())


# ── what the model is ─────────────────────────────────────────────────────────────────


def merged(model):
    """As PEFT merges a LoRA, past the counter of changes."""
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data += 0.1


def in_training(model):
    model.train()


def another_rope(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def another_setting(model):
    model.config.rope_parameters["rope_theta"] = 7.0


def steered(model):
    model.model.layers[0].register_forward_hook(lambda _, __, out: out + 1)


def another_type(model):
    model.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (merged, "weights"),
        (in_training, "mode"),
        (another_rope, "weights"),
        (another_setting, "configuration"),
        (steered, "hooks"),
        (another_type, "weights"),
    ],
)
def test_a_model_that_has_changed_since_finds_and_keeps_nothing(model, memory, change, what):
    computed(model, memory)
    with Cache(memory) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        change(model)
        with pytest.raises(ModelError, match=rf"(?s)other .*{what}.*hint: make another"):
            cache.blocks(0)
    with pytest.raises(ModelError, match=rf"(?s)other .*{what}.*hint: make another"):
        computed(model, memory)


def test_a_model_whose_change_was_taken_back_goes_on(model, memory):
    first = computed(model, memory)
    model.train().eval()
    model.set_attn_implementation("eager")
    again = computed(model, memory)
    assert again[0] == 16
    assert torch.allclose(again[1], first[1], rtol=1e-3, atol=1e-3)


def test_prefixes_of_a_model_with_hooks_are_not_found_unless_somebody_vouches(model, caplog):
    handle = model.model.layers[1].register_forward_hook(lambda *_: None)
    with ModelMemory.of(model, budget="1MiB", block_tokens=4) as memory:
        assert [computed(model, memory)[0] for _ in range(2)] == [0, 0]
    assert "hooks" in caplog.text
    identity = model_identity(model)
    with ModelMemory.of(model, budget="1MiB", block_tokens=4, identity=identity) as memory:
        assert [computed(model, memory)[0] for _ in range(2)] == [0, 16]
    handle.remove()
    assert any("hooks" in each for each in identity.differences(model_identity(model)))
