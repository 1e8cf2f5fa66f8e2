"""Sizes, counts and tables as people read them."""

import pytest

from kvstow.text import human, plural, table


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1048575, "1 MiB"),
        (1047500, "1023 KiB"),
        ((1 << 40) - 1, "1 TiB"),
        (1 << 60, "1024 PiB"),
        (20 << 30, "20 GiB"),
    ],
)
def test_a_size_has_four_digits_at_most_in_the_largest_unit_of_which_there_is_one(nbytes, text):
    assert human(nbytes) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "row", "0 rows"),
        (1, "row", "1 row"),
        (12_000, "copy", "12,000 copies"),
        (1, "copy", "1 copy"),
    ],
)
def test_a_count_has_its_noun_in_the_right_number(number, noun, text):
    assert plural(number, noun) == text


def test_columns_of_a_table_line_up_names_at_the_left_and_numbers_at_the_right():
    assert table(("name", "bytes"), [("a", "1"), ("long name", "1,000")]).splitlines() == [
        "name        bytes",
        "─────────────────",
        "a               1",
        "long name   1,000",
    ]
