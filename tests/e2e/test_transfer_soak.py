"""The soak, for a minute: `scripts/soak` runs it for longer."""

import pytest

from soak import soak


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("tcp", [False, True])
def test_a_minute_of_trouble_accepts_nothing_wrong_leaks_nothing_hangs_never(tcp):
    outcomes, wrong = soak(60, seed=11, tcp=tcp)
    assert wrong == []
    assert outcomes["accepted"] > 0
    assert {"expired", "fence", "aborted"} <= set(outcomes)
