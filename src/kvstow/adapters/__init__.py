"""Engines that keep their caches in kvstow rows. Nothing else in kvstow imports these.

transformers   a `Cache` for any decoder model
vllm           a KV connector: prefill to decode, and offload
lmcache        an L2 adapter for LMCache, on a store on disk
sglang         a storage backend for SGLang's HiCache
chunks         byte chunks of other engines in stores
router         a small HTTP router between prefill and decode instances
"""
