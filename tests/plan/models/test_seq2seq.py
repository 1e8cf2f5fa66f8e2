"""Encoder and decoder models."""

from collections import Counter

import pytest

from kvstow.errors import ModelError
from kvstow.plan.models import model_layers
from kvstow.plan.retention import Encoder, Full
from model_facts import config


def test_whisper_reads_1500_positions_of_its_encoder() -> None:
    specs = model_layers("whisper-large-v3").layers
    assert [x.name for x in specs[:2]] == [
        "model.decoder.layers.0.self_attn",
        "model.decoder.layers.0.encoder_attn",
    ]
    assert Counter(x.retention for x in specs) == {Full(): 32, Encoder(1500): 32}
    assert {x.page_bytes for x in specs} == {20 * 16 * (64 + 64) * 2}


def test_t5_says_how_long_an_encoder_it_is_planned_for() -> None:
    model = model_layers("t5-large")
    assert Counter(x.retention for x in model.layers) == {Full(): 24, Encoder(512): 24}
    assert model.notes[0].startswith("cross-attention is planned for 512 encoder tokens")
    assumed = model_layers(config("t5-large", n_positions=None))
    assert "an assumption" in assumed.notes[0]


def test_whisper_heads_must_divide_its_width() -> None:
    with pytest.raises(ModelError, match="d_model 1280 is not divisible by 19"):
        model_layers(config("whisper-large-v3", decoder_attention_heads=19))
