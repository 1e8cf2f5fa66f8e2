# pyright: reportIncompatibleMethodOverride=false, reportMissingImports=false
# pyright: reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUntypedBaseClass=false
"""What is changed in vLLM while it runs: packed rows for its CPU attention, if asked for;
connectors that are told of weight versions; steps without a pause while something is loaded."""

import os
from collections.abc import Callable
from typing import Any

CPU_ROWS = "KVSTOW_VLLM_CPU_ROWS"

Stepped = tuple[dict[int, Any] | None, bool]
"""What a step of vLLM's engine core gives: outputs for clients, and whether it has computed."""


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
        for connector in _connectors(core, ours):
            connector.name_weights(weight_version)

    EngineCore.set_weight_version = set_weight_version


def step_on_while_loading(ours: type) -> None:
    """Have vLLM take its next step at once while a connector of our class loads something.

    vLLM 0.32 pauses for a millisecond after each step that has computed nothing, for threads that
    load. Two such steps lie between the end of a load and the step that computes with it. Our
    workers wait for a load within such a step, so there is nothing to pause for.
    """
    from vllm.v1.engine.core import EngineCore

    for name in ("step", "step_with_batch_queue"):
        step = getattr(EngineCore, name, None)
        if step is not None and step.__module__ != __name__:
            setattr(EngineCore, name, _stepping_on(step, ours))


def _stepping_on(step: Callable[[Any], Stepped], ours: type) -> Callable[[Any], Stepped]:
    """The same step, and the next ones, until something was computed or somebody asks."""

    def stepped(core: Any) -> Stepped:
        outputs, computed = step(core)
        while not computed and _only_loads(core, ours):
            for output in (outputs or {}).items():
                core.output_queue.put_nowait(output)
            outputs, computed = step(core)
        return outputs, computed

    return stepped


def _only_loads(core: Any, ours: type) -> bool:
    """Whether a core in a process of its own has loads to wait for, and nothing else to do. One of
    several that step together (`engines_running`) has the others' steps to take part in. While one
    is paused its scheduler has no requests, and a step would do nothing."""
    asked = getattr(core, "input_queue", None)
    if asked is None or not asked.empty() or core.engines_running or not core.is_running():
        return False
    if not core.scheduler.has_requests():
        return False
    return any(connector.is_loading for connector in _connectors(core, ours))


def _connectors(core: Any, ours: type) -> list[Any]:
    """The connectors of our class that an engine core has, those within another one included."""
    used = core.scheduler.get_kv_connector()
    each = (used, *getattr(used, "sub_connectors", ()))
    return [connector for connector in each if isinstance(connector, ours)]
