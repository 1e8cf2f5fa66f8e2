"""What kvstow does to vLLM while it runs, all of it:

always            the connector is registered under its name (`register`, an entry point), in
                  Dynamo's table too, where Dynamo runs
weight versions   where vLLM has them, connectors are told, too (`hear_weight_versions`)
an option         steps without a pause while something is loaded (`step_while_loading`)
"""

import sys
from importlib import import_module
from typing import Any

from kvstow.adapters.vllm.engine import Step

NAME = "KvstowConnector"

DYNAMO = "dynamo.vllm.kv_connector_protocols"
"""Dynamo's table of connectors: how prefill asks for what decode is given; ours as NIXL's."""


def register() -> None:
    """Make the connector known to vLLM by its name: MultiConnector finds it only so.

    vLLM calls this at its start, in every process (entry point `vllm.general_plugins`).
    """
    factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    if NAME not in factory.KVConnectorFactory._registry:
        factory.KVConnectorFactory.register_connector(NAME, "kvstow.adapters.vllm", NAME)
    dynamo = sys.modules.get(DYNAMO)  # where it runs, it has imported this before vLLM starts
    protocols: dict[str, Any] | None = getattr(dynamo, "KV_CONNECTOR_PROTOCOLS", None)
    if protocols is not None and "NixlConnector" in protocols:
        protocols.setdefault(NAME, protocols["NixlConnector"])


def hear_weight_versions(connector_class: type) -> None:
    """Have connectors of our class told of weight versions, by `name_weights`.

    vLLM takes a weight version (`finish_weight_update`, `update_weight_version`) to its engine
    core, in the scheduler's process and thread, and to nobody else.
    """
    core_class = import_module("vllm.v1.engine.core").EngineCore
    vllm_method = getattr(core_class, "set_weight_version", None)
    if vllm_method is None or vllm_method.__module__ == __name__:
        return

    def set_weight_version(core: Any, weight_version: str) -> None:
        vllm_method(core, weight_version)
        for connector in _connectors(core, connector_class):
            connector.name_weights(weight_version)

    core_class.set_weight_version = set_weight_version


def step_while_loading(connector_class: type) -> None:
    """Have vLLM take its next step at once while a connector of our class loads something.

    vLLM pauses for a millisecond after each step that has computed nothing, for threads that
    load. Two such steps lie between the end of a load and the step that computes with it. Our
    workers wait for a load within such a step, so there is nothing to pause for.
    """
    core_class = import_module("vllm.v1.engine.core").EngineCore
    for name in ("step", "step_with_batch_queue"):
        step = getattr(core_class, name, None)
        if step is not None and step.__module__ != __name__:
            setattr(core_class, name, _without_pause(step, connector_class))


def _without_pause(step: Step, connector_class: type) -> Step:
    """The same step, and the next ones, until something was computed or somebody asks."""

    def steps(core: Any) -> tuple[dict[int, Any] | None, bool]:
        outputs, has_computed = step(core)
        while not has_computed and _only_loads(core, connector_class):
            for output in (outputs or {}).items():
                core.output_queue.put_nowait(output)
            outputs, has_computed = step(core)
        return outputs, has_computed

    return steps


def _only_loads(core: Any, connector_class: type) -> bool:
    """Whether a core in a process of its own has loads to wait for, and nothing else to do. One of
    several that step together (`engines_running`) has the others' steps to take part in. While one
    is paused its scheduler has no requests, and a step would do nothing."""
    requests = getattr(core, "input_queue", None)
    if requests is None or not requests.empty() or core.engines_running or not core.is_running():
        return False
    if not core.scheduler.has_requests():
        return False
    return any(connector.is_loading for connector in _connectors(core, connector_class))


def _connectors(core: Any, connector_class: type) -> list[Any]:
    """The connectors of our class that an engine core has, those within another one included."""
    used = core.scheduler.get_kv_connector()
    each = (used, *getattr(used, "sub_connectors", ()))
    return [connector for connector in each if isinstance(connector, connector_class)]
