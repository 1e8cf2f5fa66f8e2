"""Mutants: `scripts/mutants --count 20 --seed 7 fence ticket`.

Changes one thing in a module (a comparison, an operator, a condition, a constant, a result, a
statement that goes), in a copy of the source, and runs the tests that cover the module. A mutant
that they let pass survives, and is printed: a test is missing, or the two programs are the same.

With `--write` the run is noted in `mutants.json`. `scripts/docs` makes a page of all runs that are
noted there, each target's last one, and of what `mutants.toml` says of survivors that no test can
notice.
"""

import argparse
import ast
import copy
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import cache_from_source
from pathlib import Path
from random import Random

import pytest
import torch  # noqa: F401  what takes long to import is there when a child begins
import zmq  # noqa: F401

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"
RUNS = REPOSITORY / "tests" / "mutants.json"
REASONS = REPOSITORY / "tests" / "mutants.toml"


@dataclass(frozen=True)
class Target:
    """A module, the tests that cover it, and the functions to change (all, if none is named)."""

    module: str
    tests: tuple[str, ...]
    functions: tuple[str, ...] = ()


TARGETS = {
    "fence": Target("transfer/fence", ("transfer/test_fence", "laws/test_fence_law")),
    "ticket": Target(
        "transfer/tickets/ticket", ("transfer/tickets/test_ticket", "fuzz/test_tickets")
    ),
    "lease": Target("transfer/tickets/lease", ("transfer/tickets/test_lease",)),
    "accept": Target(
        "transfer/pull",
        (
            "transfer/test_pull",
            "laws/test_fence_law",
            "transfer/test_digests",
            "transfer/transport/test_mapped",
        ),
        (
            "written_rows",
            "pull",
            "meet_all",
            "meet",
            "ready_counts",
            "compare_digests",
            "check_still_ours",
        ),
    ),
    "read": Target(
        "offload/disk/tier",
        ("offload/disk/test_tier", "offload/disk/test_identity"),
        ("load", "_load", "_load_file", "_header", "_read_rows", "_drop"),
    ),
    "record": Target("offload/disk/format", ("offload/disk/test_format", "offload/disk/test_tier")),
    "tree": Target(
        "offload/disk/tree",
        ("offload/disk/test_tree", "offload/disk/test_tier", "offload/disk/test_opening"),
    ),
    "recovery": Target(
        "offload/disk/opening",
        ("offload/disk/test_tier", "offload/disk/test_opening"),
    ),
    "quarantine": Target(
        "transfer/quarantine", ("transfer/test_quarantine", "transfer/test_isolation")
    ),
    "identity": Target("plan/identity", ("plan/test_identity",)),
    "law": Target(
        "plan/retention", ("plan/test_retention", "blocks/test_prefix", "laws/test_blocks_prefix")
    ),
    "pool": Target(
        "blocks/pool", ("blocks/test_pool", "blocks/test_slabs", "laws/test_blocks_pool")
    ),
    "slabs": Target(
        "blocks/slabs", ("blocks/test_slabs", "blocks/test_pool", "laws/test_blocks_pool")
    ),
    "ledger": Target(
        "blocks/ledger",
        (
            "blocks/test_ledger",
            "blocks/test_requests",
            "blocks/test_prefix",
            "laws/test_blocks_ledger",
        ),
    ),
    "table": Target(
        "blocks/table", ("blocks/test_table", "blocks/test_ledger", "laws/test_blocks_ledger")
    ),
    "digest": Target("memory/digest", ("memory/test_digest", "transfer/test_digests")),
    "keys": Target("memory/digest_keys", ("memory/test_digest", "transfer/test_digests")),
    "prefix": Target(
        "blocks/prefix",
        (
            "blocks/test_prefix",
            "blocks/test_ledger",
            "laws/test_blocks_prefix",
        ),
    ),
    "pairs": Target(
        "route/blocks", ("route/test_lanes", "route/test_blocks", "laws/test_route_law")
    ),
    "lanes": Target(
        "route/lanes",
        ("route/test_route", "route/test_lanes", "laws/test_route_law"),
    ),
}

# fmt: off
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# fmt: on


# ── what can be changed ───────────────────────────────────────────────────────────────


def places(tree: ast.Module, functions: tuple[str, ...]) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every node inside a function's body that may be changed, and its parent. Annotations,
    decorators, docstrings and the words of errors are left alone."""

    def inside(parent: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        for name, value in ast.iter_fields(parent):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            for node in value if isinstance(value, list) else [value]:
                is_words = isinstance(node, ast.JoinedStr) or (
                    isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                )
                if isinstance(node, ast.AST) and not is_words:
                    yield node, parent
                    if not isinstance(node, ast.Raise):
                        yield from inside(node)

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (not functions or node.name in functions):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    continue
                yield statement, node
                yield from inside(statement)


def changes(node: ast.AST) -> list[ast.AST]:
    """The node, changed in every way that is known."""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in _COMPARISONS:
            ops = [_COMPARISONS[type(op)](), *node.ops[1:]]
            return [ast.Compare(node.left, ops, node.comparators)]
        case ast.BoolOp():
            other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            return [ast.BoolOp(other, node.values), *node.values]
        case ast.UnaryOp(op=ast.Not()):
            return [node.operand]
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return [ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)]
        case ast.Constant(value=bool() as value):
            return [ast.Constant(not value)]
        case ast.Constant(value=int() as value):
            return [ast.Constant(value + 1), ast.Constant(value - 1)]
        case ast.If() | ast.While() | ast.IfExp():
            changed = copy.copy(node)
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            return [changed]
        case ast.Return(value=ast.expr()):
            return [ast.Return(ast.Constant(None))]
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Assert():
            return [ast.Pass()]
        case _:
            return []


@dataclass(frozen=True)
class Mutant:
    function: str
    before: str
    after: str
    source: str


def mutants(source: str, functions: tuple[str, ...]) -> list[Mutant]:
    """Every mutant of a module."""
    tree = ast.parse(source)
    found: dict[str, Mutant] = {}
    functions_at = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    missing = set(functions) - {each.name for each in functions_at}
    if missing:
        raise SystemExit(f"no functions of that name: {', '.join(sorted(missing))}")
    for node, parent in list(places(tree, functions)):
        inside = [f.name for f in functions_at if any(node is each for each in ast.walk(f))]
        for changed in changes(node):
            ast.copy_location(changed, node)
            with _Replaced(parent, node, changed):
                text = ast.unparse(ast.fix_missing_locations(tree))
            before, after = (ast.unparse(each).split("\n")[0] for each in (node, changed))
            found[text] = Mutant(inside[-1], before, after, text)
    found.pop(ast.unparse(tree), None)
    return list(found.values())


class _Replaced:
    """Another node stands in a node's place meanwhile."""

    def __init__(self, parent: ast.AST, node: ast.AST, instead: ast.AST) -> None:
        self._parent, self._node, self._instead = parent, node, instead

    def __enter__(self) -> None:
        self._put(self._node, self._instead)

    def __exit__(self, *_: object) -> None:
        self._put(self._instead, self._node)

    def _put(self, old: ast.AST, new: ast.AST) -> None:
        for name, value in ast.iter_fields(self._parent):
            if value is old:
                setattr(self._parent, name, new)
            elif isinstance(value, list):
                value[:] = [new if each is old else each for each in value]


# ── running ───────────────────────────────────────────────────────────────────────────


def passes(copied: Path, tests: tuple[str, ...], seconds: float) -> bool:
    """Whether the tests pass on the copied source, in a process of their own."""
    child = os.fork()
    if not child:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(silent, fd)
        os.environ |= {"PYTHONPATH": str(copied), "HYPOTHESIS_PROFILE": "quick"}
        sys.path.insert(0, str(copied))
        files = [f"tests/{test}.py" for test in tests]
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files])))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def write(path: Path, source: str) -> None:
    """Write a module, and drop what Python compiled before: it is taken for compiled of this text
    if both are as long, and were written in the same second."""
    path.write_text(source, "utf-8")
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


@dataclass(frozen=True)
class Run:
    """What became of one target's mutants: how many were tried, of how many, and who survived."""

    date: str
    seed: int
    tried: int
    every: int
    survivors: list[list[str]]


def run(name: str, target: Target, count: int, seed: int, copied: Path) -> Run:
    """Try `count` mutants of a target, drawn by the seed."""
    path = copied / "kvstow" / f"{target.module}.py"
    source = path.read_text("utf-8")
    started = time.monotonic()
    if not passes(copied, target.tests, 600):
        raise SystemExit(f"{name}: its tests fail without any change")
    limit = 20 + 5 * (time.monotonic() - started)
    every = mutants(source, target.functions)
    sample = Random(seed).sample(every, min(count, len(every)))
    lived: list[list[str]] = []
    try:
        for mutant in sample:
            write(path, mutant.source)
            if passes(copied, target.tests, limit):
                lived.append([mutant.function, mutant.before, mutant.after])
                print(f"    {mutant.function}: {mutant.before} → {mutant.after}", flush=True)
    finally:
        write(path, source)
    print(f"{name:10} {len(sample)} of {len(every)} mutants, {len(lived)} survive", flush=True)
    return Run(datetime.now(UTC).date().isoformat(), seed, len(sample), len(every), lived)


# ── the page ──────────────────────────────────────────────────────────────────────────


def note(name: str, result: Run) -> None:
    """Note a run in place of the target's last one."""
    runs = json.loads(RUNS.read_text("utf-8")) if RUNS.exists() else {}
    runs[name] = vars(result)
    text = json.dumps({key: runs[key] for key in TARGETS if key in runs}, indent=1)
    RUNS.write_text(f"{text}\n", "utf-8")


def page() -> str:
    """The page of all noted runs: counts by target, and each survivor with the reason why it is
    one, or none."""
    runs = {name: Run(**run) for name, run in json.loads(RUNS.read_text("utf-8")).items()}
    reasons = tomllib.loads(REASONS.read_text("utf-8"))
    lines = [
        HEAD,
        "| target | module | tried | of | survived | date | seed |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | `{TARGETS[name].module}.py` | {r.tried} | {r.every} | {len(r.survivors)} "
        f"| {r.date} | {r.seed} |"
        for name, r in runs.items()
    ]
    lines += ["", TAIL, "| target | function | change | why |", "|---|---|---|---|"]
    for name, each in runs.items():
        for function, before, after in each.survivors:
            why = reasons.get(name, {}).get(f"{function}: {before} → {after}", "**not explained**")
            change = f"{before} → {after}".replace("|", "\\|")
            lines.append(f"| {name} | `{function}` | `` {change} `` | {why} |")
    return "\n".join([*lines, ""])


HEAD = """\
# Mutants

`scripts/mutants` changes one thing in a module that much rests on (a comparison, an operator, a
condition, a constant, a result, a statement that goes), in a copy of the source, and runs the tests
around the module. A change that they let pass is printed: a test is missing, or the two programs do
the same. `scripts/mutants --count 20 --seed 7 fence ticket` draws twenty per module; with `--write`
it notes the run for this page.
"""

TAIL = """\
These survived. Reasons are in `tests/mutants.toml`; where there is none, a test may be missing.
"""


def main() -> int:
    words = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__.split("\n")[0])
    words.add_argument("--count", type=int, default=20, help="mutants per module")
    words.add_argument("--seed", type=int, default=secrets.randbits(32))
    words.add_argument("--write", action="store_true", help="note the run")
    words.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    options = words.parse_args()
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        words.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(TARGETS)}")
    os.chdir(REPOSITORY)
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != SOURCE]
    sys.dont_write_bytecode = True
    print(f"seed {options.seed}")
    lived = 0
    with tempfile.TemporaryDirectory(prefix="kvstow-mutants-") as folder:
        copied = Path(folder) / "src"
        shutil.copytree(SOURCE, copied, ignore=shutil.ignore_patterns("__pycache__"))
        for name in options.targets or TARGETS:
            result = run(name, TARGETS[name], options.count, options.seed, copied)
            lived += len(result.survivors)
            if options.write:
                note(name, result)
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
