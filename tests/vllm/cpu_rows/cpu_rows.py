"""A plugin for vLLM that tests put on the path: packed rows for its attention on CPUs.

vLLM's CPU kernels follow the strides they are given, yet it declares layer-compact memory only.
"""


def widen_cpu_layouts() -> None:
    """Let vLLM's CPU attention run on rows. vLLM calls this at its start."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    def layouts(cls: type) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(layouts)
