"""`import kvstow`: every promised name is there, lazily, and the API page lists it."""

import ast
import dataclasses
import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvstow
import kvstow.errors
from kvstow.blocks.ledger import Admission

ROOT = Path(__file__).parents[1]
PURE = {
    "Blocks", "Chunk", "DType", "Encoder", "Extent", "Field", "Full", "Identity", "Keys",
    "LayerSpec", "Layout", "Ledger", "Plan", "Pool", "Prompt", "State", "Telemetry",
    "Ticket", "Window", "block_keys", "grouped", "packed", "plan_model", "plan_route",
    "separate", "union",
}  # fmt: skip
PROMISED = PURE | {
    "Agent", "Arena", "DiskTier", "HostTier", "LocalTransport", "Mover", "NixlTransport", "Options",
    "Store", "copy", "digest",
}  # fmt: skip


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_promised_name_is_exported():
    classes = inspect.getmembers(kvstow.errors, inspect.isclass)
    errors = {name for name, value in classes if issubclass(value, kvstow.errors.KvstowError)}
    assert set(kvstow.__all__) >= PROMISED | errors
    assert kvstow.__all__ == sorted(kvstow.__all__)


@pytest.mark.parametrize("name", [*kvstow.__all__, "testing"])
def test_a_name_resolves_to_what_its_room_defines(name: str):
    value = getattr(kvstow, name)
    assert value.__doc__, f"{name} has no docstring"
    assert name in dir(kvstow)


def test_the_room_of_transformers_resolves_too():
    test_a_name_resolves_to_what_its_room_defines("transformers")


def test_the_connector_resolves_where_vllm_is_installed():
    if importlib.util.find_spec("vllm.config") is None:
        with pytest.raises((ImportError, kvstow.BackendMissing)):
            _ = kvstow.vllm.KvstowConnector
    else:
        assert kvstow.vllm.KvstowConnector.__name__ == "KvstowConnector"


def test_everything_can_be_imported_at_once_and_brings_no_engine():
    program = "from kvstow import *\nimport sys\nprint(Agent.__name__, {'vllm'} & {*sys.modules})"
    assert run(program) == "Agent set()\n"


@pytest.mark.parametrize("name", ["Arena", "transformers", "Agent"])
def test_a_name_that_needs_torch_says_how_to_install_it(name):
    program = (
        "import sys\nsys.modules['torch'] = None\nimport kvstow\n"
        f"try: kvstow.{name}\nexcept kvstow.BackendMissing as error: print(error)"
    )
    assert run(program) == "torch is not installed\n\nhint: pip install 'kvstow[torch]'\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'plan_modle'"):
        _ = kvstow.plan_modle


def test_names_that_need_no_torch_do_not_import_it():
    names = ", ".join(sorted(PURE))
    assert (
        run(f"import sys\nfrom kvstow import {names}\nprint('torch' in sys.modules)") == "False\n"
    )


def test_the_package_route_is_not_the_function_that_plans_one():
    program = (
        "import kvstow, kvstow.route.route as room\n"
        "print(callable(kvstow.route), kvstow.plan_route is room.plan_route)"
    )
    assert run(program) == "False True\n"


def test_what_type_checkers_see_is_what_is_there():
    imports = [
        node
        for node in ast.parse((ROOT / "src/kvstow/__init__.pyi").read_text()).body
        if isinstance(node, ast.ImportFrom)
    ]
    seen = [(alias.asname, node.module) for node in imports for alias in node.names]
    assert dict(seen) == kvstow._MODULE_OF
    assert len(seen) == len(kvstow._MODULE_OF)


@pytest.fixture(scope="module")
def api() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/api.py"))


def test_the_api_page_says_where_to_import_every_name(api: dict[str, Any]):
    page = api["page"]()
    assert [name for name in kvstow._MODULE_OF if f"kvstow.{name}" not in page] == []
    lines = re.findall(r"^from kvstow.* import \w+$", page, re.MULTILINE)
    assert len(lines) > 60
    for line in lines:
        exec(line, {})


def test_the_api_page_has_what_calls_return_with_its_fields(api: dict[str, Any]):
    page = api["page"]()
    names = {kind.__name__ for kind in api["returned"]()}
    assert {"Admission", "RowCopy", "Transfer", "Stats"} <= names
    assert "-> Plan\n" in page
    admission = page.partition("### Admission\n")[2].partition("###")[0]
    for field in dataclasses.fields(Admission):
        assert f"{field.name}: " in admission
