"""The way that pieces take, by what each way brings."""

import pytest

from kvstow.route.ways import LONG_BYTES, Path, Rates


@pytest.mark.parametrize(
    ("read", "write", "slots", "expected"),
    [
        (5.0, 5.0, 0.0, "read"),
        (5.0, 9.0, 0.0, "read"),
        (0.48, 144.0, 3.0, "write"),  # one H200, device to device
        (0.44, 0.6, 3.2, "slots"),  # one H200, device to host
        (5.0, 0.0, 9.0, "read"),
        (0.0, 0.0, 0.0, "read"),
    ],
)
def test_the_fastest_way_is_chosen_and_the_simpler_one_where_there_is_little_to_gain(
    read, write, slots, expected
):
    path = Path(read=Rates(read, read), write=Rates(write, write), slots=slots)
    assert path.way_of(1) == path.way_of(1 << 30) == expected


def test_long_and_short_pieces_go_their_own_ways():
    # TCP between two hosts: pieces at a fifth of the rate of rows
    path = Path(read=Rates(2.8e9, 0.5e9), write=Rates(2.6e9, 0.9e9), slots=1.96e9)
    assert path.way_of(LONG_BYTES) == "read"
    assert path.way_of(LONG_BYTES - 1) == "slots"
