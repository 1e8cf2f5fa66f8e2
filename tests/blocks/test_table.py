"""Tables: what is held by logical block, for every retention."""

import numpy as np
import pytest

from block_layouts import layer
from kvstow.blocks.table import BlockTable, demands_of
from kvstow.plan.group import Group
from kvstow.plan.retention import Full, Retention, Window

SLOT = np.array([0])


def table(retention: Retention, tokens: int = 2) -> BlockTable:
    return BlockTable(Group(name="g", layers=(layer("a", retention, tokens=tokens),)))


def test_a_full_table_grows_with_its_longest_request() -> None:
    it = table(Full())
    it.open(0, 0, np.array([5, 6, 9]))
    it.append(0, np.arange(100, 300))
    it.open(1, 0, np.array([4]))
    assert it.all_ids(0).tolist() == [5, 6, 9, *range(100, 300)]
    assert it.blocks(1).ids.tolist() == [4]
    assert it.last_ids(np.array([0, 1])).tolist() == [299, 4]


def test_one_block_each_widens_the_table_where_the_longest_request_fills_it() -> None:
    it = table(Full())
    width = 8
    it.open(0, 0, np.arange(width))
    it.open(2, 0, np.array([50]))
    it.append_one_each(np.array([0, 2]), np.array([60, 61]))
    assert it.all_ids(0).tolist() == [*range(width), 60]
    assert it.all_ids(2).tolist() == [50, 61]


@pytest.mark.parametrize(
    ("count", "num_tokens", "expected"),
    [
        (2, 8, [(2, "moving")]),  # the window sees all of it
        (2, 12, [(2, "moving")]),
        (3, 12, [(2, "moving"), (1, "brief")]),
        (9, 18, [(2, "moving"), (7, "brief")]),
        (1, 40, [(1, "moving")]),
    ],
)
def test_blocks_that_no_later_token_sees_are_wanted_briefly(
    count: int, num_tokens: int, expected: list[tuple[int, str]]
) -> None:
    demands = demands_of(0, table(Window(5)), count, num_tokens)
    assert [(each.count, each.kind) for each in demands] == expected


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 4, 9])
def test_a_window_holds_what_it_sees_however_far_it_has_moved(step: int, size: int) -> None:
    it = table(Window(size), step)
    it.open(0, 0, np.array([1]))
    model = {0: 1}
    tokens, row = 1, 1
    for more in [1] * 40 + [3, 1, 50, 1, 1, 400, 1, 1, 1_000, 1, 1]:
        end = -(-(tokens + more) // step)
        count = end - int(it.end[0])
        gone = it.slide(SLOT, np.array([tokens]))
        out = {b: r for b, r in model.items() if b < int(it.first[0])}
        assert sorted(gone.tolist()) == sorted(out.values())
        model = {b: r for b, r in model.items() if b not in out}
        ids = np.arange(row + 1, row + 1 + count)
        model |= {int(it.end[0]) + i: int(r) for i, r in enumerate(ids)}
        it.append(0, ids)
        row += count
        tokens += more
        part = it.blocks(0)
        assert dict(zip(part.index.tolist(), part.ids.tolist(), strict=True)) == model
    for _ in range(3 * step):
        more = -(-(tokens + 1) // step) - int(it.end[0])
        it.slide(SLOT, np.array([tokens]))
        if more:
            it.append(0, np.array([row := row + 1]))
        tokens += 1
    assert len(it.all_ids(0)) <= (size + step - 2) // step + 1


def test_many_requests_slide_at_once() -> None:
    it = table(Window(4), 2)
    slots = np.arange(4)
    for slot in slots.tolist():
        it.open(slot, 0, slot * 10 + np.arange(4))
    gone = it.slide(slots, np.array([8, 7, 5, 3]))
    assert sorted(gone.tolist()) == [0, 1, 10, 11, 20]
    assert it.first[slots].tolist() == [2, 2, 1, 0]


def test_the_next_row_of_a_window_is_best_the_one_that_it_has_just_left() -> None:
    it = table(Window(4), 2)
    it.open(0, 0, np.array([7, 8, 9]))
    assert len(it.slide(SLOT, np.array([4]))) == 0
    assert it.slide(SLOT, np.array([5])).tolist() == [7]
    assert it.near(SLOT).tolist() == [6], "the row behind this one"
