"""Every page of the documentation says what is so: its code runs, its output is the output.

The convention, which CONTRIBUTING.md explains:

    ```python                run; `>>>` examples are compared with what they print
    ```console               `$ kvstow …` lines are run, their output is compared
    ```python needs=torch    left out where the package is absent
    ```console exit=1        the exit code, where it is not 0
    ```python file=a.py      a program of its own: written there, run by a test of its own

Blocks of a page run from top to bottom, in one namespace and one empty directory.
`...` stands for any text. Other blocks (```text, ```json, ```bash) are not run.

Run as a program, this file writes the present output into the pages, except where `...`
is part of it. Look at the difference before you commit it.
"""

import doctest
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: its language, its options (`needs`, `exit`), its text."""

    language: str
    options: dict[str, str]
    source: str
    line: int

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not here."""
        names = [name for name in self.options.get("needs", "").split(",") if name]
        return [name for name in names if importlib.util.find_spec(name) is None]


def blocks(page: str) -> Iterator[Block]:
    for match in FENCE.finditer(page):
        language, *options = match[2].split() or [""]
        yield Block(
            language=language,
            options=dict(option.split("=", 1) for option in options),
            source=dedent(match[3]),
            line=page[: match.start()].count("\n") + 1,
        )


def compared(want: str, got: str, where: str) -> None:
    """Fails unless the texts agree, `...` standing for anything."""
    want, got = (
        "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())
        for text in (want, got)
    )
    checker = doctest.OutputChecker()
    if not checker.check_output(want, got, FLAGS):
        pytest.fail(f"{where}: expected\n{want}\ngot\n{got}", pytrace=False)


def run_python(block: Block, namespace: dict[str, object], where: str) -> None:
    if "file" in block.options:
        compile(block.source, where, "exec")
        Path(block.options["file"]).write_text(block.source)
        return
    if ">>>" not in block.source:
        code = compile("\n" * block.line + block.source, where, "exec")
        exec(code, namespace)
        return
    test = doctest.DocTestParser().get_doctest(block.source, namespace, where, where, block.line)
    said: list[str] = []
    failed = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append, clear_globs=False)
    namespace.update(test.globs)
    if failed.failed:
        pytest.fail("".join(said), pytrace=False)


def commands(block: Block, where: str) -> Iterator[tuple[str, str]]:
    """Each command line of a console block, and the output that it claims."""
    before, *parts = re.split(r"^\$ ", block.source, flags=re.MULTILINE)
    if before.strip() or not parts:
        pytest.fail(f"{where}: a console block starts with `$ kvstow …`", pytrace=False)
    for part in parts:
        line, _, want = part.partition("\n")
        yield line, want


def finished(line: str, folder: Path, where: str) -> subprocess.CompletedProcess[str]:
    """The command, run in an 80-column terminal's environment; all it says is in stdout."""
    program, *arguments = shlex.split(line)
    if program != "kvstow":
        pytest.fail(f"{where}: only kvstow is run, not {program}", pytrace=False)
    return subprocess.run(
        [sys.executable, "-m", "kvstow", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", "PYTHONUTF8": "1"},
    )


def run_console(block: Block, folder: Path, where: str) -> None:
    for line, want in commands(block, where):
        done = finished(line, folder, where)
        compared(want, done.stdout, f"{where}: $ {line}")
        if done.returncode != int(block.options.get("exit", "0")):
            pytest.fail(f"{where}: $ {line}: exit code {done.returncode}", pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_what_is_so(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks(page.read_text("utf-8")):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.missing:
            continue
        if block.language == "python":
            run_python(block, namespace, where)
        elif block.language == "console":
            run_console(block, tmp_path, where)


LINKED = sorted({*PAGES, *ROOT.glob("*.md")})


def anchors(page: Path) -> set[str]:
    """What links may name behind a `#`: the headings, as MkDocs and GitHub write them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in headings)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in plain}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_of_the_repository_lead_somewhere(page):
    text = FENCE.sub("", page.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        place = page.parent / file if file else page
        if "://" not in target:  # what is only built is no page of the repository
            assert place.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(place), f"{page.name} links to {target}"


def test_the_documentation_is_not_longer_than_its_limit():
    done = subprocess.run([ROOT / "scripts/docs", "--words"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_page_is_listed_on_the_start_page_or_among_the_decisions():
    docs = ROOT / "docs"
    lists = (docs / "index.md", docs / "decisions/README.md")
    listed = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in lists
        for target in re.findall(r"\]\(([^)]+\.md[^)]*)\)", page.read_text())
    }
    pages = {page.resolve() for page in docs.rglob("*.md")}
    assert pages - listed == {(docs / "index.md").resolve()}


# ── the checks can fail ───────────────────────────────────────────────────────────────


def test_wrong_output_of_an_example_is_noticed():
    block = Block(language="python", options={}, source=">>> 1 + 1\n3\n", line=1)
    with pytest.raises(pytest.fail.Exception, match=r"Expected:\n    3\nGot:\n    2"):
        run_python(block, {}, "page")


def test_wrong_output_and_exit_code_of_a_command_are_noticed(tmp_path):
    def console(source: str, **options: str) -> Block:
        return Block(language="console", options=options, source=source, line=1)

    run_console(console("$ kvstow --version\n0...\n"), tmp_path, "page")
    with pytest.raises(pytest.fail.Exception, match="expected"):
        run_console(console("$ kvstow --version\nnone\n"), tmp_path, "page")
    with pytest.raises(pytest.fail.Exception, match="exit code 0"):
        run_console(console("$ kvstow --version\n...\n", exit="1"), tmp_path, "page")
    with pytest.raises(pytest.fail.Exception, match="only kvstow"):
        run_console(console("$ rm -rf nothing\n"), tmp_path, "page")


def test_blocks_of_a_page_are_found_with_their_options():
    page = (
        "a\n```python needs=torch,no_such_package\nx = 1\n```\n\n1. b\n\n   ```text\n   c\n   ```\n"
    )
    first, second = blocks(page)
    assert (first.language, first.source, first.line) == ("python", "x = 1\n", 2)
    assert "no_such_package" in first.missing
    assert (second.language, second.source) == ("text", "c\n")


# ── writing the present output ────────────────────────────────────────────────────────


class Recorder(doctest.DocTestRunner):
    """Collects what examples claim to print, and what they print."""

    def __init__(self) -> None:
        super().__init__(optionflags=FLAGS)
        self.said: list[tuple[str, str]] = []

    def report_success(self, out, test, example, got) -> None:
        self.said.append((example.want, got))

    report_failure = report_success


def said_now(block: Block, namespace: dict[str, object], where: str) -> list[tuple[str, str]]:
    """Output claimed and output made, for everything in a block that has some."""
    if block.missing or block.language not in ("python", "console"):
        return []
    if block.language == "console":
        folder = Path.cwd()
        return [
            (want, finished(line, folder, where).stdout) for line, want in commands(block, where)
        ]
    if ">>>" not in block.source:
        run_python(block, namespace, where)
        return []
    test = doctest.DocTestParser().get_doctest(block.source, namespace, where, where, block.line)
    recorder = Recorder()
    recorder.run(test, clear_globs=False)
    namespace.update(test.globs)
    return recorder.said


def refreshed(text: str, where: str) -> str:
    """The page with the present output, wherever it shows output without `...`."""
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks(text):
        for want, got in said_now(block, namespace, f"{where}:{block.line}"):
            if want.strip() and "..." not in want:
                text = text.replace(want.rstrip("\n") + "\n", got.rstrip("\n") + "\n")
    return text


if __name__ == "__main__":
    import tempfile

    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            page.write_text(refreshed(page.read_text("utf-8"), page.name), "utf-8")
            os.chdir(ROOT)
