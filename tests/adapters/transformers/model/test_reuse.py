"""Models whose rows serve no other prompt: everything is computed, and it is said once."""

import re

import pytest
import torch
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvstow.adapters.transformers import Cache, ModelMemory
from kvstow.adapters.transformers.passes import why_not_reused
from kvstow.testing.tiny_models import tiny_model

IDS = torch.arange(20, 40).unsqueeze(0)


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


CHANGES = {
    hooked: r"a hook on model\.layers\.1",
    own_attention: "the attention 'own'",
    own_class: "the class OwnModel",
    long_rope: r"rope \(longrope\) follows the length",
    training: "in training",
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.items())
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
