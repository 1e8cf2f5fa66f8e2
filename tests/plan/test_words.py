"""Sizes and orders as people write them."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import PlanError
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS
from kvstow.plan.pack import Site, packed
from kvstow.plan.words import parse_order, parse_size
from planning import attention

UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letter in enumerate("KMGTP")
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * 2**30),
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
def test_a_size_is_the_decimal_number_times_its_unit_or_refused(whole, thousandths, unit):
    text = f"{whole}.{thousandths:03}"
    exact = Decimal(text) * UNITS[unit]
    if exact != int(exact) or exact >= 2**63:
        with pytest.raises(PlanError):
            parse_size(text + unit)
    else:
        assert parse_size(text + unit) == int(exact)


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "20Gi", "20 gigs", "-1GiB", "0", "0GiB", "1e9", "nan", "inf", "0x10"),
        *("1,000", "1_000", "20 Gi B", "1.GiB", ".5GiB", "0.3B", "1.0001KiB", "20GiBs", "True"),
        *("9223372036854775808", "99999999PiB", "\u0662\u0660GiB", "9" * 5000, "1" + "0" * 27),
    ],
)
def test_nonsense_is_no_parse_size(text):
    with pytest.raises(PlanError):
        parse_size(text)


@pytest.mark.parametrize("value", [0, -1, True, 20e9, None, 2**63, 10**27, [1]])
def test_a_number_that_is_no_count_of_bytes_is_no_size(value):
    with pytest.raises(PlanError, match=r"not a size|not in \[1, 2\^63\)"):
        parse_size(value)


def test_a_refused_size_comes_with_an_example():
    with pytest.raises(PlanError, match=r"'20 gigs' is not a size\n\nhint: .*20GiB"):
        parse_size("20 gigs")


@pytest.mark.parametrize(
    ("text", "order"),
    [*((order.lower(), order) for order in ORDERS), ("HND", "BLHNC"), ("nhd", "BLNHC")],
)
def test_orders_are_read_in_the_spelling_people_use(text, order):
    assert parse_order(text) == order


def test_the_order_of_a_page_is_the_one_its_name_says():
    """HND: the heads of a page are farther apart than its tokens; NHD: the other way."""
    for name, outer, inner in (("HND", "head", "token"), ("NHD", "token", "head")):
        site = Site(order=parse_order(name))
        view = packed(grouped([attention("a", tokens=4, heads=3)]), num_slabs=2, site=site).view(
            "a"
        )
        assert view.axis(outer).stride > view.axis(inner).stride


@pytest.mark.parametrize("text", ["", "NHCLB", "BLHN", "H N D", 3, None])
def test_an_unknown_order_is_refused_with_those_there_are(text):
    with pytest.raises(PlanError, match=r"order .* is none of .*BLHNC.*\n\nhint: "):
        parse_order(text)
