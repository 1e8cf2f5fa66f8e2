"""A transformers `Cache` that lives in kvstow rows, for any decoder model.

    with Cache(model, memory="2GiB") as cache:
        model.generate(**inputs, past_key_values=cache)

cache       `Cache`, what `generate` is given
layers      its layers, one class per kind of layer: what transformers asks of each
sequences   the sequences behind it: requests of the ledger, and passes over them
tokens      their tokens: as prompts, and as far as they are known
rows        where their tokens lie, and their recurrent states
memory      `ModelMemory`: a layout, its arena and its ledger, for one cache or many
inspect     what a model keeps, found by letting a twin of it keep a few tokens
identity    which computation fills its cache: weights, configuration, mode, adapters
passes      passes of a model, and models whose rows serve no other prompt
prefixes    beginnings of prompts, loaded from a store and saved to it
attention   attention that reads rows in place
"""

from kvstow.adapters.transformers.cache import Cache
from kvstow.adapters.transformers.identity import model_identity
from kvstow.adapters.transformers.inspect import cache_name
from kvstow.adapters.transformers.memory import ModelMemory

__all__ = ["Cache", "ModelMemory", "cache_name", "model_identity"]
