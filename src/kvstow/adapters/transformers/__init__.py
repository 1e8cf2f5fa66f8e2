"""A transformers `Cache` that lives in kvstow rows, for any decoder model.

    with Cache(model, memory="2GiB") as cache:
        model.generate(**inputs, past_key_values=cache)

cache       `Cache`, what `generate` is given
layers      its layers, one class per kind of layer: what transformers asks of each
memory      `ModelMemory`: a layout, its arena and its ledger, for one cache or many
batch/      the sequences behind one cache: their tokens, requests and rows
model/      the model that fills it: what it keeps, its identity, its passes
prefixes    beginnings of prompts, loaded from a store and saved to it
attention   attention that reads rows in place
lightning   MiniMax, which insists on a cache class of its own
"""

from kvstow.adapters.transformers.cache import Cache
from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.model.identity import model_identity
from kvstow.adapters.transformers.model.inspect import cache_layers, cache_name

__all__ = ["Cache", "ModelMemory", "cache_layers", "cache_name", "model_identity"]
