"""What must work on a machine that lacks the optional dependencies."""

import importlib.util
import subprocess
import sys

import pytest

# Imports a package, and all modules of a package inside kvstow, while the given top-level
# packages cannot be found.
PROGRAM = """
import importlib, importlib.abc, pkgutil, sys

name, *absent = sys.argv[1:]


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{fullname} is absent", name=fullname)
        return None


sys.meta_path.insert(0, Absent())
package = importlib.import_module(name)
if name.startswith("kvstow."):
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)
"""

OPTIONAL = ("gguf", "nixl", "nixl_cu13", "safetensors", "torch", "transformers", "triton", "vllm")
NOT_FOR_PURE_CODE = ("prometheus_client", "rich", "typer", "zmq")

ABSENT = {
    "kvstow": (*OPTIONAL, *NOT_FOR_PURE_CODE, "msgspec", "numpy"),
    "kvstow.plan": (*OPTIONAL, *NOT_FOR_PURE_CODE),
    "kvstow.blocks": (*OPTIONAL, *NOT_FOR_PURE_CODE),
    "kvstow.render": OPTIONAL,
    "kvstow.cli": OPTIONAL,
}


def import_without(name: str, absent: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, name, *absent], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", [name for name in ABSENT if importlib.util.find_spec(name)])
def test_every_module_of_a_light_package_imports_without_optional_dependencies(name):
    run = import_without(name, ABSENT[name])
    assert run.returncode == 0, run.stderr


def test_a_package_made_absent_cannot_be_imported():
    run = import_without("numpy", ("numpy",))
    assert run.returncode == 1
    assert "ModuleNotFoundError: numpy is absent" in run.stderr
