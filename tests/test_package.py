import ast
import importlib.metadata
import importlib.resources
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import kvstow


def test_the_version_is_the_installed_one():
    assert importlib.metadata.version("kvstow") == kvstow.__version__


def test_the_package_says_that_it_is_typed():
    assert importlib.resources.files("kvstow").joinpath("py.typed").is_file()


def test_the_console_script_is_the_function_main_of_the_command_line():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="kvstow")
    assert [script.value for script in scripts] == ["kvstow.cli:main"]


def test_importing_kvstow_imports_nothing_but_the_standard_library():
    program = (
        "import sys; before = set(sys.modules); import kvstow;"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    imported = {name.partition(".")[0] for name in run.stdout.split()}
    assert imported - sys.stdlib_module_names == {"kvstow"}


def test_no_class_name_stands_for_two_classes():
    modules = Path(kvstow.__file__).parent.rglob("*.py")
    names = Counter(
        node.name
        for module in modules
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_public_functions_of_different_rooms_have_one_name():
    package = Path(kvstow.__file__).parent
    rooms = defaultdict(set)
    for module in package.rglob("*.py"):
        for node in ast.parse(module.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                rooms[node.name].add(module.relative_to(package).parts[0])
    assert {name: places for name, places in rooms.items() if len(places) > 1} == {}


PARTICIPLES = {
    "asked", "told", "counted", "found", "given", "opened", "chosen", "wanted", "known", "mine",
    "theirs",
}  # fmt: skip
"""They hide whether something is a request or its result: a value has a noun."""


def test_no_function_or_variable_is_called_by_a_participle():
    package = Path(kvstow.__file__).parent
    names = set()
    for module in package.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.add((str(module.relative_to(package)), name.strip("_")))
                case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                    names.add((str(module.relative_to(package)), name.strip("_")))
    assert sorted(each for each in names if each[1] in PARTICIPLES) == []


def test_every_package_names_all_its_rooms_and_no_others():
    wrong = []
    for init in Path(kvstow.__file__).parent.rglob("__init__.py"):
        said = ast.get_docstring(ast.parse(init.read_text())) or ""
        rooms = {each.stem for each in init.parent.glob("*.py")} - {"__init__", "__main__"}
        rooms |= {each.parent.name for each in init.parent.glob("*/__init__.py")}
        wrong += [(init, room) for room in rooms if not re.search(rf"\b{room}\b", said)]
        listed = re.findall(r"^(?:- `)?([a-z_]+)[/`:]* {2,}\S", said, re.MULTILINE)
        there = rooms | {each.name for each in init.parent.iterdir()}
        wrong += [(init, name) for name in listed if name not in there]
    assert wrong == []
