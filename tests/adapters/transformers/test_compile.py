"""A compiled model leaves its graphs for the cache, and computes what it computes without."""

import logging

import pytest
import torch

from kvstow.adapters.transformers import Cache, ModelMemory
from kvstow.testing.tiny_models import tiny_model

IDS = torch.arange(20, 32).unsqueeze(0)


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Forgets its graphs afterwards, and is not logged line by line."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    yield
    torch.compiler.reset()


def answered(model, memory):
    """How many tokens were found, and three that follow."""
    with Cache(memory, tokens=IDS) as cache, torch.no_grad():
        found, given = cache.found_tokens, IDS[:, cache.found_tokens :]
        answer = []
        for _ in range(3):
            given = model(given, past_key_values=cache).logits[:, -1:].argmax(-1)
            answer.append(int(given))
        return found, answer


def test_a_compiled_model_says_the_same_and_finds_the_same():
    model = tiny_model("llama")
    with ModelMemory.of(model, budget="1MiB", block_tokens=4) as memory:
        _, wanted = answered(model, memory)
    with ModelMemory.of(model, budget="1MiB", block_tokens=4) as memory:
        model.compile(backend="eager")  # what is in a graph; how that is compiled is torch's
        assert answered(model, memory) == (0, wanted)
        assert answered(model, memory) == (8, wanted)


def test_one_graph_with_the_cache_inside_is_refused_with_the_reason():
    model = tiny_model("llama")
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with Cache(model, memory="1MiB") as cache, pytest.raises(Exception, match="without fullgraph"):
        whole(IDS, past_key_values=cache)
