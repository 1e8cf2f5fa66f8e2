from hypothesis import given
from hypothesis import strategies as st

from kvstow.plan.sharing import Strip, collision, first_residue

SIZES = st.integers(1, 12)
STRIPS = st.builds(Strip, st.integers(0, 60), SIZES, st.integers(1, 30), SIZES)


def runs(strip: Strip) -> list[set[int]]:
    return [
        set(range(strip.offset + i * strip.stride, strip.offset + i * strip.stride + strip.nbytes))
        for i in range(strip.count)
    ]


@given(STRIPS, STRIPS)
def test_a_collision_is_found_exactly_when_two_runs_share_a_byte(a, b):
    found = collision(a, b)
    clashes = {
        (i, j) for i, one in enumerate(runs(a)) for j, other in enumerate(runs(b)) if one & other
    }
    assert (found in clashes) if found else not clashes


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_the_first_residue_is_the_smallest_by_trial(step, modulus, data):
    lo = data.draw(st.integers(0, modulus - 1))
    hi = data.draw(st.integers(lo, modulus - 1))
    tried = [x for x in range(modulus + 1) if lo <= step * x % modulus <= hi]
    assert first_residue(step, modulus, lo, hi) == (tried[0] if tried else None)


def test_a_collision_far_away_is_found_without_walking_there():
    """Strides 2^40 and 2^40 + 1 drift apart by one byte per block."""
    a = Strip(0, 1, 1 << 40, 1 << 30)
    b = Strip(5_000_000, 1, (1 << 40) - 1, 1 << 30)
    assert collision(a, b) == (5_000_000, 5_000_000)
    assert collision(a, Strip(1, 1, 1 << 40, 1 << 30)) is None
