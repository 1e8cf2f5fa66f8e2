"""Pages of the documentation that are made from the code, and the order of all of them.

MkDocs calls the functions named `on_…`. Built, never committed: the commands from the command
line's own definition, the Python API from docstrings, models from the catalogue, families from
transformers' configurations, surviving mutants from the recorded runs.
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
FIRST = {
    "Start": ("index", "guides/vllm", "guides/transformers", "guides/restart", "guides/sglang"),
    "Plan": ("guides/plan", "guides/route", "guides/simulate"),
    "Operate": (
        "guides/deploy", "reference/metrics", "guides/offload", "guides/routing", "security",
    ),
    "Build": ("guides/transfer", "guides/adopt", "guides/conformance"),
    "Concepts": (
        "concepts/layouts", "concepts/slabs", "concepts/blocks", "concepts/routes",
        "concepts/transfer", "concepts/offload",
    ),
    "Reference": (
        "reference/api", "reference/cli", "reference/commands", "reference/spec", "results",
        "changelog",
    ),
    "Decisions": ("decisions/README",),
}  # fmt: skip
"""The chapters, and the pages that come first in each; the rest of its folder follows."""

SCRIPTS = {
    "api": "scripts/api.py",
    "families": "scripts/families.py",
    "models": "scripts/models.py",
    "mutants": "tests/mutants.py",
}
"""Reference pages that a program writes."""


# ── MkDocs ────────────────────────────────────────────────────────────────────────────


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {
        **{
            f"reference/{name}.md": run_path(str(ROOT / file))["page"]()
            for name, file in SCRIPTS.items()
        },
        "reference/commands.md": commands_page(),
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
    """All pages: by chapter, those that are best read first in front."""
    first = {chapter: [f"{name}.md" for name in names] for chapter, names in FIRST.items()}
    placed = {page for names in first.values() for page in names}
    rest = [page for page in pages if page not in placed]
    return [
        {chapter: [*names, *(page for page in rest if page.startswith(f"{chapter.lower()}/"))]}
        for chapter, names in first.items()
    ]


# ── the page of commands ────────────────────────────────────────────────────────────────────────


def commands_page() -> str:
    """Every command and option, as the program knows them."""
    import typer

    from kvstow.cli import app

    root = typer.main.get_command(app)
    text = [
        "# Commands",
        "",
        "What `kvstow COMMAND --help` says, for every command.",
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
    return [each for name in sorted(inner) for each in _commands(inner[name], (*path, name))]


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
    return names


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
