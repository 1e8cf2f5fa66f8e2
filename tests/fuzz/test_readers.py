"""Of every reader: whole documents are accepted, and what once broke it no longer does."""

import pytest

from fuzzing import readers

READERS = readers()
REFUSING = {"dash", "objects", "words"}
"""Some of their documents are to be refused, which their own tests see to."""


@pytest.mark.parametrize("name", sorted(READERS.keys() - REFUSING))
def test_documents_that_nothing_has_happened_to_are_accepted(name):
    reader = READERS[name]
    assert {reader.outcome(data) for data in reader.valid()} == {"accepted"}


@pytest.mark.parametrize(
    ("name", "file"),
    [(name, file) for name, reader in READERS.items() for file in reader.corpus()],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_what_once_broke_a_reader_no_longer_does(name, file):
    READERS[name].outcome(file.read_bytes())
