"""The page of the Python API, which `scripts/docs` builds into the site.

Parameters, return types, fields and methods come from the code. First comes what `kvstow` itself
exports, then some names of inner modules, then every type that any of it returns, each with the
line that imports it.
"""

import enum
import inspect
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

import kvstow

CHAPTERS = {
    "Planning": ("plan_model", "Plan", "Layout", "Identity"),
    "Describing a model by hand": (
        "LayerSpec", "Field", "Extent", "DType", "Full", "Window", "Chunk", "State",
        "Encoder", "grouped", "packed", "union", "separate",
    ),
    "From layout to layout": ("plan_route", "Blocks"),
    "Who owns which row": ("Pool", "Ledger", "Prompt"),
    "Bytes on one machine": ("Arena", "copy", "digest"),
    "Between processes": (
        "Agent", "Ticket", "Options", "Keys", "NixlTransport", "LocalTransport", "Fabric",
        "Telemetry",
    ),
    "Kept elsewhere": ("Store", "HostTier", "DiskTier", "Mover", "block_keys"),
}  # fmt: skip
INNER = {
    "kvstow.plan.pack": ("Site", "Alignment", "Demand"),
    "kvstow.plan.manifest": ("encode", "decode"),
    "kvstow.route.sources": ("sources",),
    "kvstow.simulate": ("synthetic", "read_trace", "Pace", "Replay", "ReplayReport"),
    "kvstow.render.text": ("slab_picture",),
    "kvstow.events.publisher": ("EventPublisher",),
    "kvstow.offload.events": ("EngineEvents",),
    "kvstow.testing": (
        "check_attention", "check_latent_attention", "check_in_place", "check_cache_write",
    ),
}  # fmt: skip
"""Names of inner modules that programs need too."""

ENGINES = {
    "kvstow.transformers": "`Cache`: [a transformers cache](../guides/transformers.md)",
    "kvstow.vllm": "`KvstowConnector`: [inside vLLM](../guides/vllm.md)",
}

ARRAY_LIKE = (
    "_Buffer, _SupportsArray[dtype[Any]], _NestedSequence[_SupportsArray[dtype[Any]]], complex, "
    "bytes, str, _NestedSequence[complex | bytes | str]"
)
SHORT = {
    f"Union[{ARRAY_LIKE}]": "ArrayLike",
    f"Union[{ARRAY_LIKE}, NoneType]": "ArrayLike | None",
    "ndarray[tuple[Any, ...], dtype[int64]]": "Ints",
    "ndarray[tuple[Any, ...], dtype[bool]]": "Bools",
    "ndarray[tuple[Any, ...], dtype[uint8]]": "Bytes",
    "Optional[Literal['mapped', 'read', 'write', 'slots']]": "str | None",
    "Optional[Literal['always', 'sample', 'off']]": "str | None",
    "Union[Literal['memmove', 'batch', 'kernel', 'plain'], Literal['auto']]": "str",
}
PLAIN = (bool, bytes, float, int, str, tuple)
INTRODUCTION = """Most programs need only what `kvstow` itself exports: `from kvstow import Plan`. A
name is imported when it is first used. Some names of [inner modules](#inner-modules) follow, then
[what calls return](#what-calls-return) and the [errors](#errors)."""
ROOMS = (
    "plan", "route", "blocks", "simulate", "memory", "transfer", "offload", "observe", "events",
    "testing",
)  # fmt: skip
"""Where the types that calls return are defined."""


def page() -> str:
    """The whole page."""
    text = ["# Python API", "", INTRODUCTION, ""]
    exported = {name for names in CHAPTERS.values() for name in names}
    for chapter, names in CHAPTERS.items():
        text += [f"## {chapter}", ""]
        for name in names:
            text += entry(name)
    text += ["## Engines", ""]
    text += [f"- `{name}`: {what}" for name, what in ENGINES.items()]
    text += ["", "## Inner modules", ""]
    for module, names in INNER.items():
        for name in names:
            value = getattr(import_module(module), name)
            text += entry(name, value, f"from {module} import {name}")
    text += ["", "## What calls return", ""]
    for value in returned():
        text += entry(value.__name__, value, f"from {value.__module__} import {value.__name__}")
    errors = [
        name for name in kvstow.__all__ if name not in exported and f"kvstow.{name}" not in ENGINES
    ]
    text += ["## Errors", "", "All are a `kvstow.KvstowError`.", ""]
    text += [f"- `kvstow.{name}`: {summary(getattr(kvstow, name))}" for name in errors]
    return "\n".join(text) + "\n"


def entry(name: str, value: Any = None, source: str = "") -> list[str]:
    """One name: how it is called, what it is, its fields and methods."""
    value = getattr(kvstow, name) if value is None else value
    heading = name if source else f"kvstow.{name}"
    text = [f"### {heading}", "", "```python", source or f"from kvstow import {name}", "```", ""]
    is_inner = any(name in names for names in INNER.values())
    if not source or is_inner or is_dataclass(value) or issubclass(value, tuple):
        text += ["```text", called(name, value), "```", ""]
    text += [prose(value), ""]
    if inspect.isclass(value):
        text += members(value)
    return text


# ── what calls return ─────────────────────────────────────────────────────────────────


def returned() -> list[type]:
    """The classes that functions, methods and properties of the page return, and those that these
    have as fields or return."""
    exports: list[Any] = [getattr(kvstow, name) for names in CHAPTERS.values() for name in names]
    inner: list[Any] = [
        getattr(import_module(module), name) for module, names in INNER.items() for name in names
    ]
    here = {value.__name__ for value in (*exports, *inner)}
    first = names_in(each for value in (*exports, *inner) for each in results(value))
    kinds = [classes()[name] for name in first - here if name in classes()]
    second = names_in(each for kind in kinds for each in (*results(kind), *hints(kind).values()))
    kinds += [classes()[name] for name in second - first - here if name in classes()]
    return sorted(kinds, key=lambda kind: (kind.__module__, kind.__name__))


def results(value: Any) -> list[Any]:
    """What a function returns, or the public methods and properties of a class."""
    if not inspect.isclass(value):
        return [result(value)]
    public = [member for name, member in vars(value).items() if not name.startswith("_")]
    return [result(raw) for raw in map(unwrapped, public) if inspect.isfunction(raw)]


def names_in(annotations: Iterable[Any]) -> set[str]:
    return {name for each in annotations for name in re.findall(r"[A-Z]\w+", annotation(each))}


def hints(value: type) -> dict[str, Any]:
    """The annotations of a dataclass's or a tuple's fields."""
    return inspect.get_annotations(value)


def unwrapped(member: Any) -> Any:
    """The function behind a method or a property."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, cached_property):
        return member.func
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def result(function: Any) -> str:
    """The return type of a function; "" where it returns nothing."""
    value = getattr(function, "__annotations__", {}).get("return")
    return "" if value is None or value == "None" else annotation(value).strip("'\"")


@cache
def classes() -> dict[str, type]:
    """Every public class of the rooms, by name; no two have the same."""
    by_name: dict[str, type] = {}
    for room in ROOMS:
        package = import_module(f"kvstow.{room}")
        names = [package.__name__]
        names += [
            each.name
            for each in walk_packages(getattr(package, "__path__", ()), f"{package.__name__}.")
        ]
        for name in names:
            try:
                module = import_module(name)
            except (ImportError, kvstow.BackendMissing):  # an optional library that is not here
                continue
            by_name |= {
                kind.__name__: kind
                for kind in vars(module).values()
                if inspect.isclass(kind) and kind.__module__ == name and kind.__name__[0] != "_"
            }
    return by_name


# ── text ──────────────────────────────────────────────────────────────────────────────


def called(name: str, value: Any) -> str:
    """The signature, one parameter per line where it is long."""
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return f"{name}: {' | '.join(repr(str(member.value)) for member in value)}"
    parameters: list[str] = []
    for each in inspect.signature(value).parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        parameters.append(shown(each))
    gives = "" if inspect.isclass(value) or not result(value) else f" -> {result(value)}"
    line = f"{name}({', '.join(parameters)}){gives}"
    if len(line) > 90:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){gives}"
    return line


def shown(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = parameter.default
        plain = default is None or isinstance(default, int | float | str | bool | tuple | bytes)
        text += (
            f" = {default!r}" if plain and not str(type(default)).startswith("<enum") else " = …"
        )
    return text


def annotation(value: Any) -> str:
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z\w])", "", text)
    for long, short in SHORT.items():
        text = text.replace(long, short)
    return re.sub(r"ndarray\[tuple\[Any, \.\.\.\], dtype\[(\w+)\]\]", r"ndarray[\1]", text)


def prose(value: Any) -> str:
    """The docstring, as it stands."""
    paragraphs = inspect.cleandoc(value.__doc__ or "").split("\n\n")
    return "\n\n".join(
        f"```text\n{each}\n```" if each.startswith((">>>", "    ")) else each for each in paragraphs
    )


def summary(value: Any) -> str:
    """The first sentence of a docstring."""
    first = inspect.cleandoc(value.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return first.split(". ")[0].rstrip(".")


def members(value: Any) -> list[str]:
    """Fields that a caller does not give, and public methods and properties, a line each."""
    text: list[str] = []
    if is_dataclass(value):
        text += [
            f"- `.{each.name}: {annotation(each.type)}`"
            for each in fields(value)
            if not each.init and not each.name.startswith("_")
        ]
    for name, member in vars(value).items():
        raw = unwrapped(member)
        if name.startswith("_") or not getattr(raw, "__doc__", None):
            continue
        if isinstance(member, property | cached_property):
            gives = f": {result(raw)}" if result(raw) else ""
            text.append(f"- `.{name}{gives}`: {summary(raw)}")
        elif inspect.isfunction(raw):
            call = (
                re.sub(r"\s*\n\s*", " ", called(name, raw)).replace("( ", "(").replace(", )", ")")
            )
            call = re.sub(r"\((self|cls)(, )?", "(", call, count=1)
            text.append(f"- `{call}`: {summary(raw)}")
    return [*text, ""] if text else []
