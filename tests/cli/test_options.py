"""Sizes and alignments as people write them."""

import pytest
import typer

from kvstow.cli.options import alignment, parse_bytes
from kvstow.plan.pack import Alignment


def test_a_size_is_read_as_the_planner_reads_it():
    assert parse_bytes("20GiB") == parse_bytes("20G") == 20 * 2**30
    with pytest.raises(typer.BadParameter, match=r"'20 gigs' is not a size\n\nhint: .*20GiB"):
        parse_bytes("20 gigs")


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
    assert [(d.layers, d.multiple) for d in made.demands] == [("*.indexer", 576)]


@pytest.mark.parametrize("wish", ["page=", "row=x", "=", "base=0"])
def test_an_alignment_without_a_size_is_refused(wish):
    with pytest.raises(typer.BadParameter) as refused:
        alignment([wish])
    assert refused.value.param_hint == "'--align'"
    assert refused.value.message.startswith(f"{wish}: ")
