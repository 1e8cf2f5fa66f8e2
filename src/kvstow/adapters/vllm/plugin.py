# pyright: reportIncompatibleMethodOverride=false, reportMissingImports=false
# pyright: reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUntypedBaseClass=false
"""What is changed in vLLM while it runs: packed rows for its CPU attention, if asked for, and
connectors that are told of weight versions."""

import os
from typing import Any

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


def hear_weight_versions(ours: type) -> None:
    """Have connectors of our class told of weight versions, by `name_weights`.

    vLLM 0.32 takes a weight version (`finish_weight_update`, `update_weight_version`) to its engine
    core, in the scheduler's process and thread, and to nobody else.
    """
    from vllm.v1.engine.core import EngineCore

    told = EngineCore.set_weight_version
    if told.__module__ == __name__:
        return

    def set_weight_version(core: Any, weight_version: str) -> None:
        told(core, weight_version)
        used = core.scheduler.get_kv_connector()
        for each in (used, *getattr(used, "sub_connectors", ())):
            if isinstance(each, ours):
                each.name_weights(weight_version)

    EngineCore.set_weight_version = set_weight_version
