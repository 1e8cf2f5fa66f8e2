"""Bytes as people read them."""

import pytest

from kvstow.text import human


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
