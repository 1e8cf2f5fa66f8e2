"""A plugin for vLLM: its CPU attention with tokens in order inside a page, as on GPUs.

vLLM's CPU kernels keep keys transposed over a block. With `KVSTOW_ORDERED_ATTENTION` set, a few
lines of Torch stand in for them (`ordered_kernels`), which keep `[block, head, token, content]` as
FlashAttention does, and the adapter is told so.
"""

import os


def order_tokens() -> None:
    """Replace the kernels, if the environment asks for it. vLLM calls this at its start."""
    if "KVSTOW_ORDERED_ATTENTION" not in os.environ:
        return
    from ordered_kernels import OrderedAttentionImpl
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from kvstow.adapters.vllm.cache.pages import IN_TOKEN_ORDER

    CPUAttentionBackend.get_impl_cls = staticmethod(lambda: OrderedAttentionImpl)
    name = f"{OrderedAttentionImpl.__module__}.{OrderedAttentionImpl.__qualname__}"
    IN_TOKEN_ORDER["cpu", name] = "this file"
