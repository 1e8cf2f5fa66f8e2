"""A transformers `Cache` that lives in kvstow rows, for any decoder model.

memory = ModelMemory.of(model, budget=1 << 30)
with Cache(memory) as cache:
    model.generate(**inputs, past_key_values=cache)
"""

from kvstow.adapters.transformers.cache import Cache
from kvstow.adapters.transformers.inspect import HeadShard, cache_layers, cache_name
from kvstow.adapters.transformers.memory import ModelMemory

__all__ = ["Cache", "HeadShard", "ModelMemory", "cache_layers", "cache_name"]
