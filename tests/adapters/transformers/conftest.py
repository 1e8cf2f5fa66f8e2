"""A tiny model and the memory of its caches.

Imported when they are needed: conftest files come before Triton is told to interpret.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvstow.adapters.transformers import ModelMemory


@pytest.fixture(autouse=True)
def quiet() -> None:
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)


@pytest.fixture
def model() -> "PreTrainedModel":
    from kvstow.testing.tiny_models import tiny_model

    return tiny_model("llama")


@pytest.fixture
def memory(model: "PreTrainedModel") -> "Iterator[ModelMemory]":
    from kvstow.adapters.transformers import ModelMemory

    with ModelMemory.of(model, budget="1MiB", block_tokens=4) as memory:
        yield memory
