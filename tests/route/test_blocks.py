"""Lists of blocks: what is in them, and which are refused."""

import numpy as np
import pytest

from kvstow.errors import BlockError, RouteError, SpecError
from kvstow.plan.group import grouped
from kvstow.plan.pack import Alignment, Site, packed
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, Window
from kvstow.route.blocks import Blocks, Tokens, check_held, check_ids
from planning import attention, recurrent


def group(retention: Retention, tokens: int = 2):
    return grouped([attention("layers.0", tokens=tokens, retention=retention)])[0]


@pytest.mark.parametrize("index", [[1, 0], [0, 0], [-1, 0], [2**63 - 1, -(2**63)]])
def test_logical_blocks_ascend_from_0_or_later(index):
    with pytest.raises(SpecError, match="do not ascend"):
        Blocks(np.array([5, 6]), np.array(index))


def test_places_say_where_a_logical_block_is_and_whether_it_is_listed():
    places, listed = Blocks(np.array([9, 7, 8]), np.array([1, 4, 5])).places(np.arange(7))
    assert listed.tolist() == [False, True, False, False, True, True, False]
    assert places[listed].tolist() == [0, 1, 2]


@pytest.mark.parametrize("num_slabs", [12, 4000])
def test_ids_that_are_no_blocks_of_the_group_or_named_twice_are_refused(num_slabs):
    site = Site(alignment=Alignment(page=1, row=1, base=64))
    layout = packed(grouped([attention("layers.0")]), num_slabs=num_slabs, site=site)
    check_ids(layout, 0, Blocks.first([3, 7, 5, num_slabs - 1]), "source")
    check_ids(layout, 0, Blocks.first([]), "source")
    with pytest.raises(BlockError, match="source group 'full': blocks 3, 7 are named twice"):
        check_ids(layout, 0, Blocks.first([3, 7, 5, 3, 7, 3]), "source")
    with pytest.raises(BlockError, match=f"blocks 0, {num_slabs} are not among its {num_slabs}"):
        check_ids(layout, 0, Blocks.first([num_slabs, 0, 5]), "source")


@pytest.mark.parametrize(
    ("retention", "tokens", "needed"),
    [
        (Full(), Tokens(0, 7), [0, 1, 2, 3]),
        (Full(), Tokens(3, 7), [1, 2, 3]),
        (Full(), Tokens(7, 7), []),
        (Window(1), Tokens(0, 7), []),
        (Window(2), Tokens(0, 7), [3]),
        (Window(4), Tokens(0, 7), [2, 3]),
        (Window(9), Tokens(0, 7), [0, 1, 2, 3]),
        (Chunk(4), Tokens(0, 7), [2, 3]),
        (Chunk(7), Tokens(0, 7), []),
        (Encoder(3), Tokens(5, 7), [0, 1]),
        (Encoder(3), Tokens(0, 0), []),
    ],
)
def test_exactly_the_blocks_that_the_next_token_looks_at_must_be_listed(retention, tokens, needed):
    """Two tokens to a block."""
    its, index = group(retention), np.array(needed, np.int64)
    check_held(its, Blocks(index + 5, index), tokens, "source")
    for missing in needed:
        rest = index[index != missing]
        with pytest.raises(RouteError, match=f"source group .*: .* logical blocks {missing} "):
            check_held(its, Blocks(rest + 5, rest), tokens, "source")


def test_of_a_summary_the_running_one_must_be_listed():
    its = grouped([recurrent("layers.0")])[0]
    check_held(its, Blocks.first([4]), Tokens(0, 1000), "source")
    with pytest.raises(RouteError, match="logical blocks 0 "):
        check_held(its, Blocks(np.array([4]), np.array([1])), Tokens(0, 1000), "source")


def test_lists_are_no_blocks_and_the_error_says_how_to_make_them():
    with pytest.raises(SpecError, match=r"hint: Blocks\.first\(ids\)"):
        Blocks([1, 2], [0, 1])  # pyright: ignore[reportArgumentType]
