"""`import kvstow`: every promised name is there, lazily, and the API page lists it."""

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kvstow
import kvstow.errors

ROOT = Path(__file__).parents[1]
PURE = {
    "Blocks", "Chunk", "DType", "Encoder", "Extent", "Field", "Full", "Identity", "Keys",
    "LayerSpec", "Layout", "Ledger", "Plan", "Pool", "Prompt", "Sink", "State", "Telemetry",
    "Ticket", "Window", "block_keys", "grouped", "packed", "plan_model", "route",
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


def test_route_is_a_function_even_after_its_package_was_imported():
    program = (
        "import kvstow, kvstow.route.blocks\nprint(callable(kvstow.route), kvstow.route.blocks)"
    )
    assert run(program).startswith("True <module")


def test_what_type_checkers_see_is_what_is_there():
    tree = ast.parse((ROOT / "src/kvstow/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    parts = {name for name, module in seen.items() if module == "kvstow"}
    assert seen.keys() == {*kvstow.__all__, *kvstow._PARTS}
    assert parts == set(kvstow._PARTS)
    assert {n: m for n, m in seen.items() if n not in parts} == kvstow._MODULE_OF


def test_the_api_page_lists_every_name():
    page = (ROOT / "docs/reference/api.md").read_text()
    missing = [name for name in (*kvstow.__all__, *kvstow._PARTS) if f"kvstow.{name}" not in page]
    assert missing == []


def test_the_api_page_is_made_from_the_code():
    done = subprocess.run([sys.executable, ROOT / "scripts/api.py", "--check"])
    assert done.returncode == 0, "hint: python scripts/api.py"
