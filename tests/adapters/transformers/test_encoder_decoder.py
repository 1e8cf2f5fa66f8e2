"""Decoders that attend to an encoder generate the same from kvstow rows as from their own cache."""

import functools

import pytest
import torch
from transformers import (
    AutoConfig,
    EncoderDecoderCache,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)
from transformers.utils import logging

from kvstow.adapters.transformers import Cache, ModelMemory
from kvstow.errors import BlockError, ModelError
from kvstow.memory.copy import copy
from kvstow.plan.retention import Encoder, Full
from kvstow.route.route import route

SOURCE_TOKENS = 22
NEW_TOKENS = 14


@pytest.fixture(autouse=True)
def quiet():
    logging.set_verbosity_error()
    torch.set_num_threads(1)


@functools.cache
def model_of(family):
    torch.manual_seed(0)
    common = {"vocab_size": 320, "d_model": 32, "pad_token_id": 0, "eos_token_id": 1}
    common |= {"bos_token_id": 2, "decoder_start_token_id": 2}
    if family == "t5":
        config = AutoConfig.for_model(
            "t5", **common, d_kv=8, d_ff=48, num_layers=2, num_heads=4, tie_word_embeddings=False
        )
        model = T5ForConditionalGeneration(config)
    else:
        config = AutoConfig.for_model(
            "whisper",
            **common,
            num_mel_bins=8,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=SOURCE_TOKENS,
            max_target_positions=64,
            init_std=0.5,
        )
        model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed_positions" not in name:
                weight.normal_(0, 0.5)
    return model.eval()


def source(family, batch):
    generator = torch.Generator().manual_seed(1)
    if family == "t5":
        mask = torch.ones((batch, SOURCE_TOKENS), dtype=torch.long)
        mask[0, 17:] = 0
        ids = torch.randint(3, 320, mask.shape, generator=generator)
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_features": torch.randn((batch, 8, 2 * SOURCE_TOKENS), generator=generator)}


def memory_for(model, **wishes):
    wishes = {"encoder_tokens": SOURCE_TOKENS, "block_tokens": 4} | wishes
    return ModelMemory.of(model, budget=1 << 20, **wishes)


def generated(model, given, cache=None, **wishes):
    own = {} if cache is None else {"past_key_values": cache}
    return model.generate(
        **given,
        **own,
        **wishes,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def assert_same_bits(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, other in zip(ours.logits, theirs.logits, strict=True):
        assert torch.equal(mine, other)


families = pytest.mark.parametrize("family", ["t5", "whisper"])


@families
def test_a_cache_with_a_memory_of_its_own_serves_an_encoder_too(family):
    model = model_of(family)
    given = source(family, 1)
    wanted = generated(model, given)
    with Cache(model, memory="1MiB", block_tokens=4, encoder_tokens=SOURCE_TOKENS) as cache:
        assert isinstance(cache, EncoderDecoderCache)
        assert_same_bits(generated(model, given, cache), wanted)


@families
def test_the_encoder_has_rows_of_its_own(family):
    with memory_for(model_of(family)) as memory:
        assert [group.retention for group in memory.ledger.groups] == [
            Full(),
            Encoder(SOURCE_TOKENS),
        ]
        assert [spec.name for spec in memory.ledger.groups[1].layers] == [
            "layers.0.cross",
            "layers.1.cross",
        ]


@families
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("order", ["BLHNC", "LBNHC"])
def test_a_batch_has_the_same_logits(family, num_beams, order):
    model = model_of(family)
    given = source(family, 2)
    with memory_for(model, order=order) as memory:
        with Cache(memory) as cache:
            assert isinstance(cache, EncoderDecoderCache)
            ours = generated(model, given, cache, num_beams=num_beams)
            cross = [cache.blocks(i)[1].ids.tolist() for i in range(2)]
            assert {len(ids) for ids in cross} == {-(-SOURCE_TOKENS // 4)}
        memory.ledger.check()
        assert len(memory.ledger) == 0
    assert_same_bits(ours, generated(model, given, num_beams=num_beams))


@families
def test_a_cache_that_is_reset_takes_another_source(family):
    model = model_of(family)
    two = source(family, 2)
    first, second = ({k: v[i : i + 1] for k, v in two.items()} for i in range(2))
    with memory_for(model) as memory, Cache(memory) as cache:
        assert_same_bits(generated(model, first, cache), generated(model, first))
        cache.reset()
        assert_same_bits(generated(model, second, cache), generated(model, second))


@families
def test_rows_of_both_go_on_elsewhere(family):
    model = model_of(family)
    given = source(family, 1)
    tokens = torch.tensor([[2, 7, 9, 11, 13, 15]])
    elsewhere = memory_for(model, block_tokens=8, order="BHLNC")
    with memory_for(model) as memory, elsewhere, torch.no_grad():
        with Cache(memory) as cache:
            model(**given, decoder_input_ids=tokens[:, :5], past_key_values=cache)
            expected = model(**given, decoder_input_ids=tokens).logits[:, -1]
            request = elsewhere.ledger.admit(5).request
            moves = route(memory.layout, elsewhere.layout).copies(
                cache.blocks(0), elsewhere.ledger.blocks(request), 5
            )
            copy(memory.arena, elsewhere.arena, moves).wait()
        there = Cache(elsewhere, requests=[request], num_tokens=5, num_encoder_tokens=SOURCE_TOKENS)
        with there:
            found = model(**given, decoder_input_ids=tokens[:, 5:], past_key_values=there)
            torch.testing.assert_close(found.logits[:, -1], expected, rtol=1e-4, atol=1e-4)


def test_a_source_that_is_too_long_is_refused():
    model = model_of("t5")
    refused = pytest.raises(BlockError, match=r"(?s)rows for 20 .* not 22.*encoder_tokens=22")
    with memory_for(model, encoder_tokens=20) as memory, Cache(memory) as cache, refused:
        generated(model, source("t5", 1), cache)


def test_an_encoder_of_unknown_length_has_to_be_given_one():
    with pytest.raises(ModelError, match=r"encoder_tokens=\.\.\."):
        memory_for(model_of("t5"), encoder_tokens=None)
