# pyright: reportIncompatibleMethodOverride=false, reportMissingImports=false
# pyright: reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUntypedBaseClass=false
"""A plugin that vLLM loads at its start: packed rows for its CPU attention, if asked for."""

import os

CPU_ROWS = "KVSTOW_VLLM_CPU_ROWS"


def widen_cpu_layouts() -> None:
    """Let vLLM's CPU attention run on rows, if the environment asks for it.

    vLLM calls this at start (entry point `vllm.general_plugins`). Its CPU kernels follow the
    strides they are given, yet it declares layer-compact memory only.
    """
    if os.environ.get(CPU_ROWS) != "1":
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    def layouts(cls: type) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(layouts)
