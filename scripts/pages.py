"""Pages of the documentation that are made from the code, and the order of all of them.

MkDocs calls the functions named `on_…`. Made, never committed: the commands from the command
line's own definition, the Python API and the errors from docstrings, models from the catalogue,
families from transformers' configurations, surviving mutants from the runs that are noted.
"""

import inspect
import re
from pathlib import Path
from runpy import run_path
from typing import Any, Literal, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "plan": "Planning",
    "route": "Routes",
    "blocks": "Blocks",
    "simulate": "Simulation",
    "memory": "Memory",
    "transfer": "Transfer",
    "offload": "Offload",
    "adapters": "Engine adapters",
    "render": "Pictures and pages",
    "testing": "For tests",
}
KINDS = {int: "N", float: "X", Path: "FILE"}
GUIDES = {
    "Start": ("vllm", "transformers", "restart", "offload", "sglang"),
    "Plan": ("plan", "route", "simulate"),
    "Operate": ("deploy", "routing"),
    "Build": ("transfer", "adopt", "conformance"),
}
FIRST = {
    "concepts": ("layouts.md", "slabs.md", "blocks.md", "routes.md", "transfer.md", "offload.md"),
    "reference": ("api.md", "cli.md", "commands.md", "spec.md"),
}
SCRIPTS = {
    "api": "scripts/api.py",
    "families": "scripts/families.py",
    "models": "scripts/models.py",
    "mutants": "tests/mutants.py",
}
"""Reference pages that a program makes."""


# ── MkDocs ────────────────────────────────────────────────────────────────────────────


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {
        **{
            f"reference/{name}.md": run_path(str(ROOT / file))["page"]()
            for name, file in SCRIPTS.items()
        },
        "reference/commands.md": commands_page(),
        "reference/errors.md": errors_page(),
        **{f"reference/python/{name}.md": api_page(name) for name in PACKAGES if _exists(name)},
        **{
            f"{name.lower()}.md": (ROOT / f"{name}.md").read_text("utf-8").replace("](docs/", "](")
            for name in ("CHANGELOG", "SECURITY")
        },
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    config.nav = navigation(sorted(file.src_uri for file in files.documentation_pages()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fences without the options that only the tests read, such as `needs=torch`."""
    return re.sub(r"^( *```\w+)(?: \w+=\S+)+$", r"\1", markdown, flags=re.MULTILINE)


def navigation(pages: list[str]) -> list[dict[str, Any]]:
    """All pages: by folder, those that are best read first in front."""

    def of(folder: str, pattern: str = r"[^/]+\.md") -> list[str]:
        inside = [page for page in pages if re.fullmatch(f"{folder}/{pattern}", page)]
        first = [f"{folder}/{name}" for name in FIRST.get(folder, ())]
        return sorted(inside, key=lambda page: (first.index(page) if page in first else 99, page))

    def guides(title: str) -> list[str]:
        inside = [f"guides/{name}.md" for name in GUIDES[title]]
        return [*inside, "security.md"] if title == "Operate" else inside

    return [
        {"Home": "index.md"},
        *({title: guides(title)} for title in GUIDES),
        {"Concepts": of("concepts")},
        {"Reference": [*of("reference"), {"Python": of("reference/python")}]},
        {"Results": "results.md"},
        {"Decisions": of("decisions", r"README\.md") + of("decisions", r"\d.*\.md")},
        {"Changes": "changelog.md"},
    ]


# ── made pages ────────────────────────────────────────────────────────────────────────


def commands_page() -> str:
    """Every command and option, as the program knows them."""
    import typer

    from kvstow.cli import app

    root = typer.main.get_command(app)
    text = [
        "# Commands",
        "",
        "Made from the program itself: what `kvstow COMMAND --help` says.",
        "",
    ]
    for path, command in _commands(root, ()):
        text += [f"## `kvstow {' '.join(path)}`", "", inspect.cleandoc(command.help or ""), ""]
        text += _parameters(command)
    return "\n".join(text)


def _commands(command: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(path, command)]
    return [found for name in sorted(inner) for found in _commands(inner[name], (*path, name))]


def _parameters(command: Any) -> list[str]:
    rows = [
        f"| `{_spelt(each)}` | {_cell(getattr(each, 'help', '') or '')} | {_default(each)} |"
        for each in command.params
        if getattr(each, "name", "") != "help"
    ]
    return (
        ["| argument or option | meaning | default |", "|---|---|---|", *rows, ""] if rows else []
    )


def _spelt(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    names = ", ".join(parameter.opts)
    if parameter.is_flag:
        return names
    annotation = parameter.type_descriptor.annotation
    if parameter.metavar:
        return f"{names} {parameter.metavar}"
    if get_origin(annotation) is Literal:
        return f"{names} {'¦'.join(get_args(annotation))}"
    return f"{names} {KINDS.get(annotation, 'TEXT')}"


def _default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return _cell(shown)
    default = parameter.default
    if (
        shown is False
        or default is None
        or parameter.required
        or parameter.param_type_name == "argument"
    ):
        return "required" if parameter.required else ""
    return "" if default is False else f"`{getattr(default, 'value', default)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def errors_page() -> str:
    return (
        "# Errors\n\nEverything that kvstow raises on purpose. On the command line an error ends "
        "with code 1 or 2, never with a traceback.\n\n"
        "::: kvstow.errors\n    options:\n      show_root_heading: false\n"
        "      show_root_toc_entry: false\n"
    )


def api_page(package: str) -> str:
    """All modules of a package, those of its inner packages last, in the order of their names."""
    folder = ROOT / "src" / "kvstow" / package
    files = [file for file in folder.rglob("*.py") if not file.stem.startswith("_")]
    paths = sorted((file.relative_to(folder).with_suffix("").parts for file in files), key=_depth)
    text = [f"# {PACKAGES[package]}: `kvstow.{package}`", "", f"::: kvstow.{package}"]
    text += ["    options:", "      members: false", ""]
    for path in paths:
        module = ".".join(path)
        text += [f"## `{module}`", "", f"::: kvstow.{package}.{module}", ""]
    return "\n".join(text)


def _depth(path: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    return len(path) > 1, path


def _exists(package: str) -> bool:
    return (ROOT / "src" / "kvstow" / package / "__init__.py").exists()
