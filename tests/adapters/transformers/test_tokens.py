"""Sequences as prompts: what their token ids do not tell must be told, or they are refused."""

import functools
from copy import deepcopy

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import kvstow
from kvstow.adapters.transformers import ModelMemory
from kvstow.adapters.transformers.passes import padding_token, placeholder_tokens
from kvstow.adapters.transformers.tokens import naming_fault, padding_of, prompts_of
from kvstow.errors import BlockError
from kvstow.testing.tiny_models import tiny_model
from kvstow.transformers import Cache

IMAGE = 299
IDS = torch.tensor([[*range(4), *[IMAGE] * 16, *range(10, 30)]])
ONE, OTHER = b"one image".ljust(16), b"another image".ljust(16)


@functools.cache
def seeing_model():
    """A tiny model that is given images."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    text = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return LlavaForConditionalGeneration(config).eval()


def test_prompts_of_two_images_share_nothing_and_of_one_image_everything(tmp_path):
    model = seeing_model()
    images = {ONE: torch.ones(1, 3, 16, 16), OTHER: -torch.ones(1, 3, 16, 16)}
    found = []
    with kvstow.Store(disk=tmp_path / "kv", disk_bytes="8MiB") as store:
        for digest in (ONE, OTHER, ONE):
            extra = [[(4, digest)]]
            with Cache(model, memory="2MiB", tokens=IDS, extra=extra, store=store) as cache:
                found.append(cache.found_tokens)
                given = {} if cache.found_tokens else {"pixel_values": images[digest]}
                with torch.no_grad():
                    rest = IDS[:, cache.found_tokens :]
                    got = model(rest, past_key_values=cache, use_cache=True, **given).logits
            whole = model(IDS, pixel_values=images[digest]).logits
            assert torch.allclose(got[:, -1], whole[:, -1], atol=1e-5)
    assert found == [0, 0, 32]


def test_tokens_that_stand_for_an_image_nobody_names_are_computed_and_not_reused(caplog):
    model = seeing_model()
    image = torch.ones(1, 3, 16, 16)
    with ModelMemory.of(model, budget="2MiB") as memory, torch.no_grad():
        for _ in range(2):
            with Cache(memory, tokens=IDS) as cache:
                assert cache.found_tokens == 0
                model(IDS, pixel_values=image, past_key_values=cache)
        with Cache(memory, tokens=IDS, extra=[[(4, ONE)]]) as cache:
            assert cache.found_tokens == 0
    assert "computed and not reused: tokens stand for images" in caplog.text


@pytest.mark.parametrize("shape", [(0, 8), (1, 0), (8,), (1, 2, 3)])
def test_tokens_that_are_no_sequences_are_refused(shape):
    with pytest.raises(BlockError, match="no sequences"):
        prompts_of(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("shape", [(2, 8), (1, 7), (1, 9), (8,)])
def test_a_mask_of_another_shape_is_refused_with_both(shape):
    with pytest.raises(BlockError, match=r"mask is \(.*tokens are \(1, 8\)"):
        prompts_of(torch.zeros((1, 8), dtype=torch.long), torch.ones(shape))


def test_equal_tokens_behind_different_padding_are_different_prompts():
    ids = torch.tensor([[7, 1, 2, 3], [7, 1, 2, 3]])
    plain, padded = prompts_of(ids, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]))
    assert plain.hashes(2).tolist() != padded.hashes(2).tolist()


def test_a_mask_with_a_hole_is_refused():
    with pytest.raises(BlockError, match="not padding on the left"):
        prompts_of(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 0, 1]]))


def test_prompts_of_arrays_are_those_of_tensors():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    tokens = torch.tensor([[0, 5, 6], [5, 6, 7]])
    given = prompts_of(tokens.numpy(), mask.numpy())
    wanted = prompts_of(tokens, mask)
    assert [(each.tokens.tolist(), each.salt) for each in given] == [
        (each.tokens.tolist(), each.salt) for each in wanted
    ]
    assert [padding_of(each) for each in given] == [1, 0]


def test_a_cache_is_not_copied_and_says_what_to_do_instead():
    with (
        Cache(ModelMemory.of(tiny_model("llama"), budget="1MiB")) as cache,
        pytest.raises(TypeError, match=r"(?s)cannot be copied.*hint: Cache\(memory, tokens"),
    ):
        deepcopy(cache)


def test_every_sequence_with_an_image_names_it():
    both = IDS.repeat(2, 1)
    for extra in ([[(4, ONE)], []], [[(4, ONE)], [(5, OTHER)]]):
        fault = naming_fault(prompts_of(both, None, extra), {IMAGE}, None, has_mask=False)
        assert "stand for images" in fault
    named = prompts_of(both, None, [[(4, ONE)], [(3, OTHER)]])
    assert naming_fault(named, {IMAGE}, None, has_mask=False) == ""


def test_placeholders_are_found_inside_nested_configurations():
    model = tiny_model("llama")
    model.config.vision_config = {"image_token_id": 77}
    assert placeholder_tokens(model) == {77}


def test_padding_without_a_mask_is_computed_and_not_reused(caplog):
    """`generate` hides padding, and a forward pass does not."""
    model = tiny_model("llama")
    pad = model.generation_config.pad_token_id
    ids = torch.tensor([[pad, pad, 1, 2, 3, 4]])
    with ModelMemory.of(model, budget="1MiB", block_tokens=2) as memory, torch.no_grad():
        for mask in (None, torch.ones_like(ids), (ids != pad).long()):
            with Cache(memory, tokens=ids, attention_mask=mask) as cache:
                assert cache.found_tokens == 0
                if mask is None:
                    model(ids, past_key_values=cache)
                    continue
                model(ids, mask, (mask.cumsum(1) - 1).clamp(0), past_key_values=cache)
    assert f"padding token {pad} among them, and no mask" in caplog.text


def test_a_padding_token_that_ends_sequences_is_a_token_like_others():
    model = tiny_model("llama")
    model.generation_config.pad_token_id = model.generation_config.eos_token_id
    assert padding_token(model) is None
