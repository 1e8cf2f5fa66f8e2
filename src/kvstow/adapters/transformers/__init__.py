"""A transformers `Cache` that lives in kvstow rows, for any decoder model.

memory = ModelMemory.of(model, budget=1 << 30)
with KvstowCache(memory) as cache:
    model.generate(**inputs, past_key_values=cache)
"""

from kvstow.adapters.transformers.cache import KvstowCache
from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.shard import Shard
from kvstow.adapters.transformers.specs import cache_layers, cache_name

__all__ = ["KvstowCache", "ModelMemory", "Shard", "cache_layers", "cache_name"]
