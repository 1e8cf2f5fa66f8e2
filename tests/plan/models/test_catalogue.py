"""Models by name, and where the facts of each came from."""

import re
from pathlib import Path
from runpy import run_path

import pytest

from kvstow.errors import ModelError
from kvstow.plan.models import load_model, model_layers
from kvstow.plan.models.catalogue import entries, repository

CONFIRMED = [name for name, entry in entries().items() if "unchecked" not in entry["source"]]


REMAINDER = re.compile(r"; unchecked: \S.*$")


ROOT = Path(__file__).parents[3]


def numbers(text: str, pattern: str) -> list[int]:
    """The numbers of the first place in `text` that matches."""
    found = re.search(pattern, " ".join(text.split()))
    assert found is not None, pattern
    return [int(number) for number in found.groups()]


@pytest.mark.parametrize("name", sorted(set(entries()) - set(CONFIRMED)))
def test_a_source_ends_in_what_is_unchecked_and_names_it(name: str) -> None:
    assert REMAINDER.search(entries()[name]["source"])


@pytest.mark.parametrize("name", sorted(entries()))
def test_a_note_says_what_is_unchecked_of_a_model_and_of_no_other(name: str) -> None:
    found = [note for note in model_layers(name).notes if "unchecked" in note]
    wanted = f"{name}: its dtype is unchecked: no source that was read says it"
    assert found == ([] if name in CONFIRMED else [wanted])


def test_the_list_of_models_names_those_that_are_unchecked() -> None:
    text = run_path(str(ROOT / "scripts/models.py"))["page"]()
    names = re.findall(r"^- (\S+): its dtype is unchecked", text, re.M)
    assert sorted(names) == sorted(set(entries()) - set(CONFIRMED))
    assert all(f"\n| {name} |" in text for name in entries())


@pytest.mark.parametrize("name", CONFIRMED)
def test_a_confirmed_model_names_a_repository_an_issue_a_page_or_a_report(name: str) -> None:
    assert re.search(r"\w/\w|\w\.\w+/|arXiv \d|README|config\.json of", entries()[name]["source"])


def test_the_guide_counts_the_models_and_those_confirmed_in_full() -> None:
    guide = (ROOT / "docs/guides/plan.md").read_text("utf-8")
    assert numbers(guide, r"The catalogue has (\d+) models") == [len(entries())]
    open_ = len(entries()) - len(CONFIRMED)
    assert numbers(guide, r"(\d+) are confirmed in full .* the other (\d+)") == [
        len(CONFIRMED),
        open_,
    ]


@pytest.mark.parametrize("name", sorted(entries()))
def test_every_catalogue_model_has_a_repository_of_one_of_its_names(name: str) -> None:
    known = repository(name).rpartition("/")
    assert known[0]
    assert load_model(known[2]).name == name


def test_no_name_or_alias_means_two_models() -> None:
    names = [alias for name, entry in entries().items() for alias in (name, *entry["aliases"])]
    assert len({name.lower() for name in names}) == len(names)
    assert all(name == name.lower() for name in entries())


@pytest.mark.parametrize(
    "name",
    ["Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "LLAMA-3.1-8B-INSTRUCT", "llama-3.1-8b"],
)
def test_names_are_found_in_any_case_with_or_without_organisation(name: str) -> None:
    assert load_model(name).name == "llama-3.1-8b"


def test_an_unknown_name_is_refused_with_those_close_to_it() -> None:
    with pytest.raises(ModelError, match=r"'llama-3.1-9b'(?s:.*)hint: .*llama-3.1-8b"):
        load_model("llama-3.1-9b")


@pytest.mark.parametrize("name", ["\0", "x" * 5000, ""])
def test_names_that_no_file_can_have_are_only_unknown(name: str) -> None:
    with pytest.raises(ModelError):
        load_model(name)
