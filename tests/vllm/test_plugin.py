"""What is changed in the vLLM that is installed: what it has, and what it still does."""

from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.adapters.vllm.plugin import NAME, register, step_while_loading

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


class Connector:
    is_loading = True


def made(monkeypatch: pytest.MonkeyPatch, connector: object) -> tuple[Any, list[str]]:
    """A core in a process of its own, whose third step computes, and what it does."""
    from vllm.v1.engine import core

    did: list[str] = []

    def step(self: Any) -> tuple[Any, bool]:
        did.append("step")
        return {0: f"output {len(did)}"}, did.count("step") > 2

    monkeypatch.setattr(core.EngineCore, "step_with_batch_queue", step)
    monkeypatch.setattr(core.EngineCore, "step", step)
    monkeypatch.setattr(core.time, "sleep", lambda seconds: did.append("pause"))
    step_while_loading(Connector)
    engine = object.__new__(core.EngineCoreProc)
    engine.scheduler = SimpleNamespace(
        has_requests=lambda: True, get_kv_connector=lambda: connector
    )
    engine.input_queue, engine.output_queue = Queue(), Queue()
    engine.engines_running, engine.check_for_draft_tokens = False, False
    engine.shutdown_state = core.EngineShutdownState.RUNNING
    engine.step_fn = engine.step_with_batch_queue
    return engine, did


def test_vllm_pauses_after_a_step_that_computes_nothing(monkeypatch):
    """If it no longer does, nothing has to be changed any more."""
    engine, did = made(monkeypatch, object())
    engine._process_engine_step()
    assert did == ["step", "pause"]


def test_it_takes_all_steps_at_once_while_we_load(monkeypatch):
    engine, did = made(monkeypatch, Connector())
    engine._process_engine_step()
    assert did == ["step", "step", "step"]
    assert [engine.output_queue.get_nowait() for _ in did] == [
        (0, "output 1"),
        (0, "output 2"),
        (0, "output 3"),
    ]


def test_a_request_that_waits_comes_first(monkeypatch):
    engine, did = made(monkeypatch, Connector())
    engine.input_queue.put("a request")
    engine._process_engine_step()
    assert did == ["step", "pause"]


def test_a_pause_that_keeps_requests_is_answered_while_we_load(monkeypatch):
    """A paused scheduler has no requests, and a step of vLLM's own then does nothing."""
    engine, did = made(monkeypatch, Connector())
    engine.scheduler.has_requests = lambda: False
    engine._process_engine_step()
    assert did == ["step"]


def test_vllm_offers_all_that_the_connector_uses():
    from kvstow.adapters.vllm.bases import ConnectorBase
    from kvstow.adapters.vllm.connector import OWN_NAMES, KvstowConnector
    from kvstow.adapters.vllm.engine import check_engine

    check_engine(KvstowConnector, ConnectorBase, OWN_NAMES)


def test_the_connector_is_known_by_its_name_however_often_it_is_registered():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for _ in range(2):
        register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME).__name__ == NAME
