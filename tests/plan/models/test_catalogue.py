"""Where the catalogue's facts come from, and what the documents say of it."""

import re
from pathlib import Path

import pytest

from kvstow.plan.models.catalogue import entries

ROOT = Path(__file__).parents[3]
CONFIRMED = [name for name, entry in entries().items() if "unchecked" not in entry["source"]]
REMAINDER = re.compile(r"; unchecked: \S.*$")


def numbers(text: str, pattern: str) -> list[int]:
    """The numbers of the first place in `text` that matches."""
    found = re.search(pattern, " ".join(text.split()))
    assert found is not None, pattern
    return [int(number) for number in found.groups()]


def test_at_least_forty_models_are_confirmed_in_full() -> None:
    assert len(CONFIRMED) >= 40


@pytest.mark.parametrize("name", sorted(set(entries()) - set(CONFIRMED)))
def test_a_source_ends_in_what_is_unchecked_and_names_it(name: str) -> None:
    assert REMAINDER.search(entries()[name]["source"])


@pytest.mark.parametrize("name", CONFIRMED)
def test_a_confirmed_model_names_a_repository_an_issue_a_page_or_a_report(name: str) -> None:
    assert re.search(r"\w/\w|\w\.\w+/|arXiv \d|README|config\.json of", entries()[name]["source"])


def test_the_guide_counts_the_models_and_those_confirmed_in_full() -> None:
    guide = (ROOT / "docs/guides/plan.md").read_text("utf-8")
    known, confirmed, rest = numbers(
        guide, r"catalogue knows (\d+) models .* of (\d+) models .* other (\d+) say"
    )
    assert (known, confirmed) == (len(entries()), len(CONFIRMED))
    assert rest == known - confirmed


def test_the_changelog_counts_them_too() -> None:
    log = (ROOT / "CHANGELOG.md").read_text("utf-8").split("\n## ")[1]
    assert numbers(log, r"(\d+) models by name") == [len(entries())]
    assert numbers(log, r"(\d+) of its (\d+) models are") == [len(CONFIRMED), len(entries())]
