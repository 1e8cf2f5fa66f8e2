"""Sizes and alignments as people write them."""

from decimal import Decimal

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from kvstow.cli.options import alignment, size
from kvstow.plan.pack import Alignment

UNITS = {
    "": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * 2**30),
        ("512MB", 512_000_000),
        ("1.5TiB", 3 * 2**39),
        ("1073741824", 2**30),
        ("0.1GB", 100_000_000),
        ("80 gib", 80 * 2**30),
        (" 1B ", 1),
        ("9223372036854775807", 2**63 - 1),
        ("0.000000001GB", 1),
    ],
)
def test_a_size_is_exact(text, nbytes):
    assert size(text) == nbytes


@given(st.integers(1, 9000), st.integers(0, 999), st.sampled_from(sorted(UNITS)))
def test_a_size_is_the_decimal_number_times_its_unit_or_refused(whole, thousandths, unit):
    text = f"{whole}.{thousandths:03}"
    exact = Decimal(text) * UNITS[unit]
    if exact != int(exact) or exact >= 2**63:
        with pytest.raises(typer.BadParameter):
            size(text + unit)
    else:
        assert size(text + unit) == int(exact)


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "20G", "20K", "-1GiB", "0", "0GiB", "1e9", "nan", "inf", "0x10", "1,000", "1_000",
     "20 Gi B", "1.GiB", ".5GiB", "0.3B", "1.0001KiB", "9223372036854775808", "99999999PiB",
     "\u0662\u0660GiB", "20GiBs", "True"],
)  # fmt: skip
def test_nonsense_is_no_size(text):
    with pytest.raises(typer.BadParameter):
        size(text)


def test_a_refused_size_comes_with_an_example():
    with pytest.raises(typer.BadParameter, match=r"'20G' is not a size\n\nhint: .*20GiB"):
        size("20G")


def test_without_wishes_the_alignment_is_the_planners_own():
    assert alignment([]) == Alignment()


def test_a_bare_size_aligns_pages_and_the_base_with_them():
    made = alignment(["12288"])
    assert (made.page, made.row) == (12288, Alignment().row)
    assert made.base % 12288 == 0
    assert made.base % 4096 == 0


def test_rows_base_and_layers_are_named():
    made = alignment(["row=4KiB", "base=2MiB", "*.indexer=576"])
    assert (made.page, made.row) == (Alignment().page, 4096)
    assert made.base % 2**21 == 0
    assert made.base % 576 == 0
    assert [(d.layers, d.offset_multiple, d.stride_multiple) for d in made.demands] == [
        ("*.indexer", 576, 576)
    ]


@pytest.mark.parametrize("wish", ["page=", "row=x", "=", "base=0"])
def test_an_alignment_without_a_size_is_refused(wish):
    with pytest.raises(typer.BadParameter):
        alignment([wish])
