"""What the entry point changes, under stand-ins of vLLM's and Dynamo's tables."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from connected_engine import (
    Engine,
    Role,
    StandInCore,
    blocks,
    cache_config,
    loaded,
    request,
    vllm_config,
)
from kvstow.adapters.vllm.plugin import DYNAMO, NAME, register

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Connectors that vLLM knows by name."""
    known: dict[str, Any] = {}

    def register_connector(name: str, module: str, cls: str) -> None:
        known[name] = (module, cls)

    module = ModuleType(FACTORY)
    vars(module)["KVConnectorFactory"] = SimpleNamespace(
        _registry=known, register_connector=register_connector
    )
    for end in range(1, FACTORY.count(".") + 1):
        name = ".".join(FACTORY.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, FACTORY, module)
    return known


def test_vllm_knows_the_connector_by_its_name_however_often_it_is_registered(
    registered: dict[str, Any],
):
    for _ in range(2):
        register()
    assert registered == {NAME: ("kvstow.adapters.vllm", NAME)}
    assert DYNAMO not in sys.modules


def test_dynamo_hands_requests_over_as_with_nixls_connector(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    table = {"NixlConnector": object(), "MooncakeConnector": object()}
    monkeypatch.setitem(sys.modules, DYNAMO, SimpleNamespace(KV_CONNECTOR_PROTOCOLS=table))  # pyright: ignore
    register()
    assert table[NAME] is table["NixlConnector"]


def test_a_dynamo_without_such_a_table_is_left_as_it_is(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, DYNAMO, SimpleNamespace())  # pyright: ignore
    register()


# ── weight versions and steps ─────────────────────────────────────────────────────────────


def test_a_weight_version_reaches_a_connector_among_others(connector: ModuleType):
    from vllm.v1.engine.core import EngineCore  # pyright: ignore

    engine = Engine(connector)
    before = engine.scheduler._scheduler._engine.weights.identity
    core = EngineCore(SimpleNamespace(sub_connectors=[object(), engine.scheduler]))
    core.set_weight_version("step 1")
    assert core.weight_version == "step 1"
    assert dict(engine.scheduler._scheduler._engine.weights.identity.config) == {
        **dict(before.config),
        "run.weights": "'step 1'",
    }


@pytest.fixture
def loading(connector: ModuleType) -> SimpleNamespace:
    """An engine that loads a prompt, and its core, whose eighth step computes."""
    from vllm.v1.engine.core import EngineCoreProc  # pyright: ignore

    prefill, decode = (Engine(connector, step_while_loading=True) for _ in range(2))
    decode.decode(prefill.prefill(), [1, 2, 3, 13, 12])
    steps: list[str] = []

    def take_step() -> tuple[dict[int, str] | None, bool]:
        steps.append("step")
        return ({0: f"output {len(steps)}"}, False) if len(steps) < 8 else (None, True)

    core = EngineCoreProc(decode.scheduler, take_step)
    return SimpleNamespace(core=core, steps=steps, scheduler=decode.scheduler, decode=decode)


@pytest.mark.parametrize("name", ["step", "step_with_batch_queue"])
def test_an_engine_that_only_loads_takes_its_next_step_at_once(loading: SimpleNamespace, name: str):
    """vLLM would pause after each: what they gave is heard all the same, and in order."""
    assert getattr(loading.core, name)() == (None, True)
    assert len(loading.steps) == 8
    told = [loading.core.output_queue.get_nowait() for _ in range(7)]
    assert told == [(0, f"output {k}") for k in range(1, 8)]


def test_an_engine_with_nothing_to_load_takes_one_step(loading: SimpleNamespace):
    loaded(loading.decode)
    loading.scheduler.update_state_after_alloc(request("d"), blocks([1, 2, 3, 13, 12]), 0)
    assert loading.core.step() == ({0: "output 1"}, False)


@pytest.mark.parametrize("why", ["asked", "ends", "steps with others", "paused"])
def test_an_engine_that_loads_has_an_ear_for_others(loading: SimpleNamespace, why: str):
    """Requests, its end, and engines that compute in step with it come first. While it is paused
    its scheduler has no requests."""
    if why == "asked":
        loading.core.input_queue.put("a request")
    loading.core.runs = why != "ends"
    loading.core.engines_running = why == "steps with others"
    loading.core.scheduler.has_requests = lambda: why != "paused"
    assert loading.core.step() == ({0: "output 1"}, False)
    assert len(loading.steps) == 1


def test_vllms_steps_are_its_own_unless_an_option_says_otherwise(connector: ModuleType):
    from vllm.v1.engine.core import EngineCore  # pyright: ignore

    before = EngineCore.step, EngineCore.step_with_batch_queue  # pyright: ignore
    connector.KvstowConnector(vllm_config(), Role.SCHEDULER, cache_config())
    assert (EngineCore.step, EngineCore.step_with_batch_queue) == before  # pyright: ignore


def test_an_engine_without_weight_versions_is_left_as_it_is(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    from vllm.v1.engine.core import EngineCore  # pyright: ignore

    monkeypatch.delattr(StandInCore, "set_weight_version")
    connector.KvstowConnector(vllm_config(), Role.SCHEDULER, cache_config())
    assert not hasattr(EngineCore, "set_weight_version")
