"""The memory of a model: which computation fills it, and a model left as it was when it fails."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvstow.adapters.transformers import Cache, ModelMemory, model_identity
from kvstow.adapters.transformers import memory as memory_module
from kvstow.errors import ArenaError, ModelError
from kvstow.plan.identity import Identity
from kvstow.testing.tiny_models import tiny_model

# ── identity ──────────────────────────────────────────────────────────────────────────


def test_a_copy_of_a_model_is_the_same_computation():
    model = tiny_model("llama")
    assert model_identity(model) == model_identity(copy.deepcopy(model))
    assert model_identity(model).is_verified


def test_every_tensor_counts():
    model = tiny_model("llama")
    whole = model_identity(model)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.mul_(2)
            assert model_identity(model) != whole, name
            parameter.div_(2)
    assert model_identity(model) == whole


@pytest.mark.parametrize(
    "change", [{"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}]
)
def test_a_configuration_that_computes_otherwise_is_told_in_words(change):
    model = tiny_model("llama")
    ours = model_identity(model)
    model.config.update(change)
    assert any("rope_theta" in each for each in ours.differences(model_identity(model)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_element_type_is_another_computation(dtype):
    ours = model_identity(tiny_model("llama"))
    theirs = model_identity(tiny_model("llama").to(dtype))
    assert any(each.startswith("cache dtype") for each in ours.differences(theirs))


def test_weights_that_are_not_in_memory_need_an_identity_of_their_own():
    model = tiny_model("llama")
    model.lm_head.to("meta")
    with pytest.raises(ModelError, match=r"(?s)lm_head.weight.*identity="):
        model_identity(model)


def test_the_layout_of_a_memory_names_its_computation():
    model = tiny_model("llama")
    with ModelMemory.of(model, budget=1 << 20) as memory:
        assert memory.layout.identity == model_identity(model)
        assert memory.layout.model == "llama"


def test_ranks_of_one_model_have_the_identity_that_they_are_given():
    model = tiny_model("llama")
    identity = Identity.unverified("each rank holds a part of the weights", model="m")
    with ModelMemory.of(model, budget=1 << 20, tp=(0, 2), identity=identity) as memory:
        assert memory.layout.identity == identity
        assert memory.layout.model == "m"


# ── a model is left as it was ─────────────────────────────────────────────────────────


def test_a_model_whose_arena_does_not_fit_keeps_its_attention(monkeypatch):
    model = tiny_model("llama")
    before = model.config._attn_implementation

    def full(*_, **__):
        raise ArenaError("does not fit")

    monkeypatch.setattr(memory_module, "Arena", full)
    with pytest.raises(ArenaError):
        ModelMemory.of(model, budget=1 << 20, in_place=True)
    assert model.config._attn_implementation == before


def test_a_model_has_its_own_attention_again_when_the_memory_is_closed():
    model = tiny_model("llama")
    before = model.config._attn_implementation
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        wanted = model(ids).logits
        with ModelMemory.of(model, budget=1 << 20, in_place=True):
            assert model.config._attn_implementation != before
        assert model.config._attn_implementation == before
        assert torch.equal(model(ids).logits, wanted)


def test_a_model_that_cannot_attend_in_place_is_left_as_it_was():
    model = tiny_model("llama4_text")
    before = model.config._attn_implementation
    with pytest.raises(ModelError, match="in_place"):
        ModelMemory.of(model, budget=1 << 20, in_place=True)
    assert model.config._attn_implementation == before


# ── one line ──────────────────────────────────────────────────────────────────────────


def test_a_cache_makes_its_own_memory_and_takes_it_along():
    model = tiny_model("llama")
    ids = torch.arange(20).unsqueeze(0)
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False)
    with Cache(model, memory="1MiB", block_tokens=4) as cache:
        found = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
        assert cache.memory.layout.nbytes <= 1 << 20
        assert cache.memory.layout.groups[0].group.block_tokens == 4
    assert torch.equal(found, wanted)
    with pytest.raises(ArenaError):
        _ = cache.memory.arena.bytes


def test_a_model_that_insists_on_a_class_of_its_own_is_served_by_the_same_line():
    with Cache(tiny_model("minimax"), memory="4MiB") as cache:
        assert isinstance(cache, MiniMaxCache)


def test_a_memory_is_not_given_twice():
    model = tiny_model("llama")
    with (
        ModelMemory.of(model, budget=1 << 20) as memory,
        pytest.raises(TypeError, match="memory"),
    ):
        Cache(memory, memory="1MiB")
    with pytest.raises(TypeError, match="memory"):
        Cache(model)


# ── prefixes that another prompt may not use ──────────────────────────────────────────

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_parameters": LONG | {"factor": 8.0, "original_max_position_embeddings": 32}},
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
    ],
    ids=["dynamic", "longrope", "bidirectional"],
)
def test_rows_that_depend_on_more_than_the_tokens_before_are_not_found_again(change):
    short = torch.arange(20, 44).unsqueeze(0)
    longer = torch.cat([short, torch.arange(100, 140).unsqueeze(0)], 1)
    model = changed_model(change)
    with ModelMemory.of(model, budget="1MiB", block_tokens=4) as memory:
        for ids in (short, longer):
            with Cache(memory, tokens=ids) as cache, torch.no_grad():
                got = model(ids[:, cache.found_tokens :], past_key_values=cache).logits[:, -1]
            assert torch.allclose(got, model(ids).logits[:, -1], atol=1e-4)


def changed_model(change):
    """A tiny model whose positions are made for 32 tokens."""
    given = tiny_model("llama").config.to_dict()
    rope = {"rope_theta": 100.0, **change.get("rope_parameters", {"rope_type": "default"})}
    given |= {"max_position_embeddings": 32, **change, "rope_parameters": rope}
    if "model_type" in change:
        del given["rope_parameters"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    return AutoModelForCausalLM.from_config(config).eval()
