"""The way that is chosen between two agents."""

import pytest

from kvstow.transfer.peers.probe import chosen


@pytest.mark.parametrize(
    ("read", "write", "staged", "expected"),
    [
        (5.0, 5.0, 0.0, "read"),
        (5.0, 9.0, 0.0, "read"),
        (0.48, 144.0, 3.0, "write"),  # one H200, device to device
        (0.44, 0.6, 3.2, "staged"),  # one H200, device to host
        (5.0, 0.0, 9.0, "read"),
        (0.0, 0.0, 0.0, "read"),
    ],
)
def test_the_fastest_way_is_chosen_and_the_simpler_one_where_there_is_little_to_gain(
    read, write, staged, expected
):
    assert chosen(read, write, staged).direction == expected
    assert chosen(read, write, staged, "write").direction == "write"
