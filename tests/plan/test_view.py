from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import PlanError
from kvstow.plan.view import Run, align_up, ceil_div, joined, parse_size


@given(st.integers(0, 999), st.integers(1, 99))
def test_align_up_is_the_next_multiple(value, multiple):
    result = align_up(value, multiple)
    assert result % multiple == 0
    assert 0 <= result - value < multiple
    assert ceil_div(value, multiple) == result // multiple


@given(st.sets(st.integers(0, 40)))
def test_joined_runs_cover_the_same_bytes_and_never_touch(bytes_):
    result = joined(Run(b, 1) for b in bytes_)
    assert {b for run in result for b in range(run.offset, run.end)} == bytes_
    assert all(a.end < b.offset for a, b in pairwise(result))


# ── sizes as people write them ────────────────────────────────────────────────────────────


UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letter in enumerate("KMGTP")
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * 2**30),
        ("3.05GiB", 3_274_912_563),
        ("46.46GiB", 49_886_045_143),
        ("512MB", 512_000_000),
        ("1.5TiB", 3 * 2**39),
        ("1073741824", 2**30),
        (1073741824, 2**30),
        ("20G", 20 * 2**30),
        ("20g", 20 * 2**30),
        ("64k", 2**16),
        ("0.1GB", 100_000_000),
        ("80 gib", 80 * 2**30),
        (" 1B ", 1),
        ("9223372036854775807", 2**63 - 1),
        ("0.000000001GB", 1),
    ],
)
def test_a_size_is_exact(text, nbytes):
    assert parse_size(text) == nbytes


@given(st.integers(1, 9000), st.integers(0, 999), st.sampled_from(sorted(UNITS)))
def test_a_size_is_the_decimal_number_times_its_unit_rounded_down(whole, thousandths, unit):
    text = f"{whole}.{thousandths:03}"
    exact = Decimal(text) * UNITS[unit]
    if exact >= 2**63:
        with pytest.raises(PlanError):
            parse_size(text + unit)
    else:
        assert parse_size(text + unit) == int(exact)


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "20Gi", "20 gigs", "-1GiB", "0", "0GiB", "1e9", "nan", "inf", "0x10"),
        *("1,000", "1_000", "20 Gi B", "1.GiB", ".5GiB", "0.3B", "20GiBs", "True"),
        *("9223372036854775808", "99999999PiB", "\u0662\u0660GiB", "9" * 5000, "1" + "0" * 27),
    ],
)
def test_nonsense_is_no_size(text):
    with pytest.raises(PlanError):
        parse_size(text)


@pytest.mark.parametrize("value", [0, -1, True, 20e9, None, 2**63, 10**27, [1]])
def test_a_number_that_is_no_count_of_bytes_is_no_size(value):
    with pytest.raises(PlanError, match=r"not a size|not in \[1, 2\^63\)"):
        parse_size(value)
