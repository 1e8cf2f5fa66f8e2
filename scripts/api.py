"""The page of everything that `import kvstow` gives: `python scripts/api.py` writes it.

Constructors, fields and methods come from the code. With --check nothing is written, and the exit
code is 1 if the page is not the one in docs/reference/api.md.
"""

import enum
import inspect
import re
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import kvstow

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "api.md"
CHAPTERS = {
    "Planning": ("plan_model", "Plan", "Layout", "Identity"),
    "Describing a model by hand": (
        "LayerSpec", "Field", "Extent", "DType", "Full", "Window", "Chunk", "Sink", "State",
        "Encoder", "grouped", "packed", "union", "separate",
    ),
    "From layout to layout": ("route", "Blocks"),
    "Who owns which row": ("Pool", "Ledger", "Prompt"),
    "Bytes on one machine": ("Arena", "copy", "digest"),
    "Between processes": (
        "Agent", "Ticket", "Options", "Keys", "NixlTransport", "LocalTransport", "Fabric",
        "Telemetry",
    ),
    "Kept elsewhere": ("Store", "HostTier", "DiskTier", "Mover", "block_keys"),
}  # fmt: skip
ENGINES = {
    "kvstow.transformers": "`Cache`: [a transformers cache](../guides/transformers.md)",
    "kvstow.vllm": "`KvstowConnector`: [inside vLLM](../guides/vllm.md)",
    "kvstow.testing": "`check_attention`: [checking an attention kernel](../guides/conformance.md)",
}

ARRAY_LIKE = (
    "_Buffer, _SupportsArray[dtype[Any]], _NestedSequence[_SupportsArray[dtype[Any]]], complex, "
    "bytes, str, _NestedSequence[complex | bytes | str]"
)
SHORT = {
    f"Union[{ARRAY_LIKE}]": "ArrayLike",
    f"Union[{ARRAY_LIKE}, NoneType]": "ArrayLike | None",
    "ndarray[tuple[Any, ...], dtype[int64]]": "Ints",
    "Union[Literal['memmove', 'batch', 'kernel', 'plain'], Literal['auto']]": "str",
}
PLAIN = (bool, bytes, float, int, str, tuple)
INTRODUCTION = """All of it is in `kvstow` itself; nothing is imported before it is used.
Made from the code by `scripts/api.py`."""


def page() -> str:
    """The whole page."""
    text = ["# Python API", "", INTRODUCTION, ""]
    listed = {name for names in CHAPTERS.values() for name in names}
    for chapter, names in CHAPTERS.items():
        text += [f"## {chapter}", ""]
        for name in names:
            text += entry(name)
    text += ["## Engines and tests", ""]
    text += [f"- `{name}`: {what}" for name, what in ENGINES.items()]
    rest = [
        name for name in kvstow.__all__ if name not in listed and f"kvstow.{name}" not in ENGINES
    ]
    text += ["", "## Errors", "", "All are a `kvstow.KvstowError`.", ""]
    text += [f"- `kvstow.{name}`: {summary(getattr(kvstow, name))}" for name in rest]
    return "\n".join(text) + "\n"


def entry(name: str) -> list[str]:
    """One name: how it is called, what it is, its fields and methods."""
    value = getattr(kvstow, name)
    text = [f"### kvstow.{name}", "", "```text", called(name, value), "```", "", prose(value), ""]
    if inspect.isclass(value):
        text += members(value)
    return text


def called(name: str, value: Any) -> str:
    """The signature, one parameter per line where it is long."""
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return f"{name}: {' | '.join(repr(str(member.value)) for member in value)}"
    parameters: list[str] = []
    for each in inspect.signature(function(value)).parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        parameters.append(shown(each))
    line = f"{name}({', '.join(parameters)})"
    if len(line) > 90:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + ")"
    return line


def function(value: Any) -> Any:
    """A callable package stands for the function of its name."""
    return value.route.route if inspect.ismodule(value) and not callable(value.route) else value


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
    return text


def prose(value: Any) -> str:
    """The docstring, as it stands."""
    paragraphs = inspect.cleandoc(function(value).__doc__ or "").split("\n\n")
    return "\n\n".join(
        f"```text\n{each}\n```" if each.startswith((">>>", "    ")) else each for each in paragraphs
    )


def summary(value: Any) -> str:
    """The first sentence of a docstring."""
    first = inspect.cleandoc(value.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return first.split(". ")[0].rstrip(".")


def members(value: Any) -> list[str]:
    """Public methods and properties that a class defines itself, a line each."""
    text: list[str] = []
    for name, member in vars(value).items():
        raw = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if name.startswith("_") or not getattr(raw, "__doc__", None):
            continue
        if inspect.isfunction(raw):
            call = (
                re.sub(r"\s*\n\s*", " ", called(name, raw)).replace("( ", "(").replace(", )", ")")
            )
            call = re.sub(r"\((self|cls)(, )?", "(", call, count=1)
            text.append(f"- `{call}`: {summary(raw)}")
        elif isinstance(raw, property | cached_property):
            text.append(f"- `.{name}`: {summary(raw)}")
    return [*text, ""] if text else []


def main() -> None:
    made = page()
    if "--check" in sys.argv[1:]:
        raise SystemExit(not PAGE.is_file() or PAGE.read_text("utf-8") != made)
    PAGE.write_text(made, "utf-8")


if __name__ == "__main__":
    main()
