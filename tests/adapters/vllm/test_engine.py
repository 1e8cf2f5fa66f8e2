"""What vLLM must offer, compared with classes of our own in its place."""

import logging
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvstow.adapters.vllm import engine
from kvstow.adapters.vllm.engine import (
    READ_VERSIONS,
    REQUIRED,
    Request,
    check_engine,
    check_sleep,
    names_of,
    stop_one_token_short,
)
from kvstow.errors import SpecError


class Base:
    def start_load_kv(self) -> None: ...


class Connector(Base):
    is_loading = False

    def start_load_kv(self) -> None: ...


def pretended(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0") -> dict[str, type]:
    """A vLLM whose classes have what is used and nothing else; the classes, by name."""
    modules = {"vllm": ModuleType("vllm")}
    vars(modules["vllm"])["__version__"] = version
    classes: dict[str, type] = {}
    for where, name, used in REQUIRED:
        module = modules.setdefault(where, ModuleType(where))
        attributes: dict[str, Any] = dict.fromkeys(names_of(used))
        classes[name] = vars(module)[name] = type(name, (), attributes)
    for where, module in modules.items():
        monkeypatch.setitem(sys.modules, where, module)
    return classes


def test_a_vllm_that_has_all_names_is_taken(monkeypatch: pytest.MonkeyPatch):
    pretended(monkeypatch)
    check_engine(Connector, Base, ["is_loading"])


@pytest.mark.parametrize(
    ("name", "attribute"), [("Request", "num_in_flight_tokens"), ("BlockPool", "touch")]
)
def test_an_attribute_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, attribute: str
):
    delattr(pretended(monkeypatch, "0.40.1")[name], attribute)
    with pytest.raises(SpecError, match=rf"vLLM 0\.40\.1 does not have \S+\.{name}\.{attribute},"):
        check_engine(Connector, Base, ["is_loading"])


def test_a_class_or_module_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    pretended(monkeypatch)
    monkeypatch.delattr(sys.modules["vllm.v1.request"], "Request")
    monkeypatch.setitem(sys.modules, "vllm.lora.request", None)
    with pytest.raises(SpecError, match=r"vllm\.lora\.request\.LoRARequest, vllm\.v1\.request\.Re"):
        check_engine(Connector, Base, ["is_loading"])


def test_a_method_that_vllm_would_never_call_is_named(monkeypatch: pytest.MonkeyPatch):
    pretended(monkeypatch)
    with pytest.raises(SpecError, match=r"Base\.is_loading"):
        check_engine(Connector, Base, [])


def test_attributes_count_wherever_a_class_has_them():
    @dataclass
    class Declares:
        size: int

    class Sets:
        def __init__(self) -> None:
            self.size = 1

    for cls in (Declares, Sets, SimpleNamespace):
        assert ("size" in engine._offered(cls)) is (cls is not SimpleNamespace)  # pyright: ignore


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [("0.32.0", False), ("0.33.1+cpu", False), ("0.34.0rc1", True), ("1.0", True), ("dev", False)],
)
def test_a_newer_version_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, is_newer: bool
):
    pretended(monkeypatch, version)
    with caplog.at_level(logging.WARNING, "kvstow"):
        check_engine(Connector, Base, ["is_loading"])
    assert len(caplog.records) == is_newer
    assert all(READ_VERSIONS[-1] in record.message for record in caplog.records)


def test_only_a_prompt_that_is_counted_as_it_lies_loses_its_last_token():
    """Otherwise vLLM has changed what a request is made of."""

    def request(counted: int) -> Any:
        tokens = [1, 2, 3]
        return SimpleNamespace(
            request_id="r",
            kv_transfer_params={},
            prompt_token_ids=tokens,
            all_token_ids=tokens.copy(),
            num_prompt_tokens=counted,
        )

    with pytest.raises(SpecError, match="3 prompt tokens, 3 in all, 4 counted"):
        stop_one_token_short(request(4))


def test_every_name_of_a_protocol_is_looked_for():
    assert {"request_id", "_all_token_ids", "num_tokens"} <= names_of(Request)
    assert not any(name.startswith("__") for name in names_of(Request))


def test_sleep_mode_is_refused_where_vllm_does_not_tell_its_connector():
    config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    tells = type("Tells", (), {"unregister_kv_caches": None})
    check_sleep(config, tells, ["unregister_kv_caches"])
    with pytest.raises(SpecError, match="hint: vLLM 0"):
        check_sleep(config, object, ["unregister_kv_caches"])
    config.model_config.enable_sleep_mode = False
    check_sleep(config, object, ["unregister_kv_caches"])
