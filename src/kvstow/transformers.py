"""A transformers `Cache` that lives in kvstow rows: see `kvstow.adapters.transformers`."""

from kvstow.adapters.transformers import Cache

__all__ = ["Cache"]
