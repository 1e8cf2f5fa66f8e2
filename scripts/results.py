"""The tables in README.md and docs/results.md: `python scripts/results.py`.

bench/headlines.json has their lines: what was measured, kvstow's figure, what it is compared with,
and the limit of the machine; those that are `in_readme` are in README.md, too. In a cell,
`{one host>rows:.1f}` is the number at that place of the line's file. Files that are not there have
no lines; a figure that its file does not have is an error. With --check, nothing is written, and
the exit code is 1 if a table is not the one that would be made.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: made by scripts/results.py -->", "<!-- /results -->"
COLUMNS = ("what", "kvstow", "baseline", "limit")
HEADING = "| measured | kvstow | compared with | limit | machine, date |\n|---|---|---|---|---|"
NOTHING = "Nothing measured yet is committed: `bench/` holds the scripts.\n"


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Every document of results, by the name of its file."""
    return {
        file.name: json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))
    }


def found(document: Any, path: list[str], where: str) -> float:
    """The number at a path."""
    for key in path:
        if not isinstance(document, dict) or key not in document:
            known = list(document) if isinstance(document, dict) else document
            raise SystemExit(f"{where}: no {key!r} on the way of {path}; there is {known}")
        document = document[key]
    return float(document)


def machine_words(document: dict[str, Any]) -> str:
    """The machine in few words, and the date."""
    machine = document.get("machine", "machine not noted")
    if not isinstance(machine, dict):
        return str(machine)
    main = machine.get("gpu") or f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores"
    return f"{main}, {machine.get('date', 'undated')}"


def cell(template: str, document: dict[str, Any], where: str) -> str:
    """A cell of the table with its figures filled in."""

    def figure(match: re.Match[str]) -> str:
        return format(found(document, match[1].split(">"), where), match[2])

    return re.sub(r"\{([^:}]+):([^}]*)\}", figure, template)


def table(headlines: list[dict[str, Any]], results: dict[str, dict[str, Any]]) -> str:
    """The lines whose files are there, as a Markdown table."""
    text = ""
    for line in headlines:
        if line["file"] in results:
            document = results[line["file"]]
            cells = [cell(line.get(name, ""), document, line["file"]) for name in COLUMNS]
            text += f"| {' | '.join([*cells, machine_words(document)])} |\n"
    if not text:
        return NOTHING
    return f"{HEADING}\n{text}"


def replaced(page: str, made: str) -> str:
    """The page with the table between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no {BEGIN} and {END} to put the table between")
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def pages() -> dict[Path, str]:
    """The pages with tables, as they should be."""
    headlines = json.loads((ROOT / "bench" / "headlines.json").read_text("utf-8"))
    results = read_results(ROOT / "bench" / "results")
    first = [line for line in headlines if line.get("in_readme")]
    listed = {ROOT / "README.md": first, ROOT / "docs" / "results.md": headlines}
    return {
        file: replaced(file.read_text("utf-8"), table(lines, results))
        for file, lines in listed.items()
    }


def main() -> None:
    if "--check" in sys.argv[1:]:
        raise SystemExit(any(text != file.read_text("utf-8") for file, text in pages().items()))
    for file, text in pages().items():
        file.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
