"""A tiny Llama, and memory for it."""

import pytest

from kvstow.adapters.transformers import ModelMemory
from kvstow.testing.tiny_models import tiny_model


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def memory(model):
    with ModelMemory.of(model, budget="1MiB", block_tokens=4) as memory:
        yield memory
