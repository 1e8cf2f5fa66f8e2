"""A transformers `Cache` that lives in kvstow rows, for any decoder model.

    with Cache(model, memory="2GiB") as cache:
        model.generate(**inputs, past_key_values=cache)

cache       `Cache`, what `generate` is given
layers      its layers, one class per kind of layer: what transformers asks of each
inspect     what a model keeps, found by letting it keep a few tokens
identity    which computation fills its cache: weights, configuration, code, adapters
memory      `ModelMemory`: a layout, its arena and its ledger, for one cache or many
sequences   the sequences behind one cache: what its layers store, pass by pass
requests    their requests of the ledger: admitted, forked, grown, released
prompts     tokens, padding and other content of sequences, as prompts
known       which tokens are known, and what may be kept under their names
watch       a model that is given other tokens than its cache, or has changed, is refused
ropes       ropes that follow the length: which rows serve which prompts
prefixes    beginnings of prompts, loaded from a store and saved to it
states      recurrent states of the sequences, and passes that only they see
rows        rows of a batch's tokens: tokens written to them and gathered
attention   attention that reads rows in place
lightning   MiniMax, which insists on a cache class of its own
"""

from kvstow.adapters.transformers.cache import Cache
from kvstow.adapters.transformers.identity import model_identity
from kvstow.adapters.transformers.inspect import HeadShard, cache_layers, cache_name
from kvstow.adapters.transformers.memory import ModelMemory

__all__ = ["Cache", "HeadShard", "ModelMemory", "cache_layers", "cache_name", "model_identity"]
