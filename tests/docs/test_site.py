"""The documentation builds, warnings being errors, and holds what the code says."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import kvstow
from kvstow import errors

ROOT = Path(__file__).resolve().parents[2]


class Text(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.parts = []
        self.feed(page.read_text("utf-8"))
        self.text = " ".join(" ".join(self.parts).split())

    def handle_data(self, data):
        self.parts.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'kvstow[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_chapters_are_in_the_order_in_which_people_need_them(site):
    text = Text(site / "index.html").text
    chapters = r"Start.*Plan.*Operate.*Build.*Concepts.*Reference.*Decisions"
    assert re.search(chapters, text[: text.index("Install")])


def test_every_command_is_in_the_reference(site):
    from typer.main import get_command

    from kvstow.cli import app

    text = Text(site / "reference/commands/index.html").text
    for name, command in get_command(app).commands.items():
        assert f"kvstow {name}" in text
        for parameter in command.params if not hasattr(command, "commands") else ():
            if parameter.opts[0].startswith("--") and parameter.name != "help":
                assert parameter.opts[0] in text


def test_the_python_api_is_in_the_reference(site):
    text = Text(site / "reference/api/index.html").text
    for member in kvstow.DType:
        assert member.name in text or member.value in text
    assert "Where each field starts inside a cell" in text  # a property
    assert "tokens_per_state" in text  # a field
    assert "num_tokens" in text  # a parameter
    for name in vars(errors):
        if name.endswith(("Error", "Missing")) or name == "OutOfBlocks":
            assert name in text


def test_every_metric_is_in_the_reference(site):
    from kvstow.observe import Telemetry
    from kvstow.offload.metrics import TierMetrics
    from kvstow.transfer.metrics import TransferMetrics

    telemetry = Telemetry()
    TransferMetrics(telemetry.registry)
    TierMetrics(telemetry.registry, [])
    text = Text(site / "reference/metrics/index.html").text
    for line in telemetry.exposition().decode().splitlines():
        if line.startswith("# HELP ") and not line.split()[2].endswith("_created"):
            assert line.split()[2] in text


def test_every_event_of_an_agent_is_in_the_reference():
    text = (ROOT / "docs/reference/metrics.md").read_text("utf-8")
    sources = [file.read_text("utf-8") for file in (ROOT / "src/kvstow/transfer").rglob("*.py")]
    found = {name for each in sources for name in re.findall(r'\.note\(\s*"([a-z-]+)"', each)}
    assert len(found) > 8
    assert [name for name in sorted(found) if f"`{name}`" not in text] == []


def test_options_that_only_tests_read_are_not_shown(site):
    for page in site.rglob("*.html"):
        assert "needs=torch" not in page.read_text("utf-8").replace("<code>needs=torch</code>", "")


def test_pages_of_the_site_fetch_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        for attribute in ('src="http', 'rel="stylesheet" href="http', "fonts.googleapis"):
            assert attribute not in text, page


@pytest.mark.parametrize("words", ["list of models", "restart", "S3"])
def test_the_search_finds_what_people_look_for(site, words):
    """Every word is in the title or the text of one and the same section."""
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    sections = [f"{each['title']} {each['text']}".lower() for each in index["docs"]]
    found = [text for text in sections if all(w in text.split() for w in words.lower().split())]
    assert found
    titles = [each["title"].lower() for each in index["docs"]]
    assert any(words.lower() in title for title in titles), titles


@pytest.mark.parametrize("path", sorted((ROOT / "docs/guides").glob("*.md")), ids=lambda p: p.stem)
def test_a_guide_begins_with_what_you_will_have_and_how_long_it_takes(path):
    _title, first, *_ = path.read_text("utf-8").split("\n\n")
    first = " ".join(first.split())
    assert first.startswith("At the end you")
    assert "takes about" in first
    assert "minutes" in first
