"""Engines that keep their caches in kvstow rows. Nothing else in kvstow imports these.

transformers   a `Cache` for any decoder model
vllm           a KV connector: prefill to decode, and offload
router         a small HTTP router between prefill and decode instances
"""
