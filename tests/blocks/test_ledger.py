"""What a ledger promises: bounds, all or nothing, copies before writes, handles that end."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from block_layouts import HYBRID, MIXED, RECURRENT, layer, ledger_of, state, tokens
from kvstow.blocks.ledger import Ledger
from kvstow.blocks.prompt import Prompt
from kvstow.blocks.rows import KEPT, NEW
from kvstow.blocks.table import RowCopy
from kvstow.errors import BlockError, WrongThread
from kvstow.plan.retention import Window


def test_a_number_of_numpy_is_a_number_of_tokens_and_a_list_is_no_prompt() -> None:
    """A list was counted, and its tokens were found by nobody."""
    ledger = ledger_of(*HYBRID)
    request = ledger.admit(np.int64(5)).request
    assert ledger.num_tokens(request) == 5
    with pytest.raises(BlockError, match=r"list is neither .*\n\nhint: kvstow.Prompt.of"):
        ledger.admit([1, 2, 3])  # pyright: ignore[reportArgumentType]


def test_a_ledger_of_a_layout_is_refused_with_what_to_do() -> None:
    layout = ledger_of(*HYBRID).pool.layout
    with pytest.raises(BlockError, match=r"not Layout\n\nhint: Ledger\(Pool\(layout\)\)"):
        Ledger(layout)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 17])
def test_an_admitted_request_holds_what_the_plan_says_it_needs(num_tokens: int) -> None:
    for layers in (HYBRID, RECURRENT, MIXED):
        ledger = ledger_of(*layers)
        request = ledger.admit(num_tokens).request
        for g, part in ledger.blocks(request).items():
            assert len(part) == ledger.groups[g].rows_needed(num_tokens, in_flight=num_tokens)
        assert ledger.num_tokens(request) == num_tokens


def test_growing_inside_a_block_holds_nothing_more() -> None:
    ledger = ledger_of(layer("a", tokens=4))
    request = ledger.admit(1).request
    for n in (1, 2, 3, 4):
        ledger.grow(request, n)
        assert len(ledger.blocks(request)[0]) == 1
        assert ledger.unfilled_tokens(0) == 4 - n
    ledger.grow(request, 5)
    assert len(ledger.blocks(request)[0]) == 2


def test_a_windows_row_becomes_its_next_one_with_another_generation() -> None:
    ledger = ledger_of(layer("a", Window(2), tokens=1))
    request = ledger.admit(3).request
    ledger.grow(request, 4)
    before = ledger.blocks(request)[0]
    old = int(before.ids[0])
    ticket = int(ledger.pool.generations[0][old])
    ledger.grow(request, 5)
    after = ledger.blocks(request)[0]
    assert after.index.tolist() == [3, 4]
    assert after.ids[-1] == old
    assert ledger.pool.generations[0][old] > ticket


def test_a_leased_row_is_not_written_again_when_the_window_leaves_it() -> None:
    ledger = ledger_of(layer("a", Window(2), tokens=1))
    request = ledger.admit(3).request
    ledger.grow(request, 4)
    leased = ledger.blocks(request)[0].ids[:1]
    ledger.pool.share(0, leased)
    ticket = int(ledger.pool.generations[0][leased[0]])
    for n in (5, 6, 7):
        ledger.grow(request, n)
        assert leased[0] not in ledger.blocks(request)[0].ids
    assert ledger.pool.generations[0][leased[0]] == ticket
    ledger.pool.release(0, leased)
    ledger.check()


# ── forks ─────────────────────────────────────────────────────────────────────────────


def test_a_fork_shares_full_blocks_and_copies_the_one_being_written() -> None:
    ledger = ledger_of(layer("a", tokens=4), caching=False)
    one = ledger.admit(6).request
    two = ledger.fork(one).request
    assert np.array_equal(ledger.blocks(one)[0].ids, ledger.blocks(two)[0].ids)
    (copy,) = ledger.grow(two, 7)
    assert copy == RowCopy(0, int(ledger.blocks(one)[0].ids[1]), int(ledger.blocks(two)[0].ids[1]))
    assert ledger.blocks(one)[0].ids[0] == ledger.blocks(two)[0].ids[0]
    assert ledger.grow(one, 7) == ()
    ledger.check()


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    ledger = ledger_of(layer("a", tokens=4), caching=False)
    one = ledger.admit(8).request
    two = ledger.fork(one).request
    assert ledger.grow([one, two], [9, 9]) == ()
    assert ledger.blocks(one)[0].ids[2] != ledger.blocks(two)[0].ids[2]


def test_a_fork_copies_the_running_state_at_once() -> None:
    ledger = ledger_of(*RECURRENT, caching=False)
    one = ledger.admit(5).request
    fork = ledger.fork(one)
    rows = [int(ledger.blocks(r)[1].ids[0]) for r in (one, fork.request)]
    assert fork.copies == (RowCopy(1, rows[0], rows[1]),)
    assert rows[0] != rows[1]


def test_a_copy_of_a_row_that_nobody_knows_is_not_known_either() -> None:
    ledger = ledger_of(*RECURRENT, caching=False)
    one = ledger.admit(5).request
    for g, listed in ledger.blocks(one).items():
        ledger.pool.distrust(g, listed.ids)  # a pull has failed there
    fork = ledger.fork(one)
    copies = [*fork.copies, *ledger.grow(fork.request, 6)]
    assert {copy.group for copy in copies} == {0, 1}
    for copy in copies:
        assert ledger.pool.unknown(copy.group, copy.destination)
    ledger.check()


def test_a_copy_of_a_row_that_lacks_tokens_lacks_them_too() -> None:
    ledger = ledger_of(layer("a", tokens=4), caching=False)
    one = ledger.admit(6).request
    ids = ledger.blocks(one)[0].ids
    ledger.pool.distrust(0, ids)
    ledger.pool.trust(0, ids, np.array([True, False]))
    two = ledger.fork(one).request
    (copy,) = ledger.grow(two, 7)
    assert ledger.pool.suspect(0, copy.destination)
    assert not ledger.pool.unknown(0, copy.destination)
    ledger.check()


# ── refusals ─────────────────────────────────────────────────────────────────────────


def test_impossible_steps_are_refused() -> None:
    ledger = ledger_of(layer("a"))
    request = ledger.admit(3).request
    for wrong in (
        lambda: ledger.admit(0),
        lambda: ledger.admit(5, num_tokens=6),
        lambda: ledger.grow(request, 2),
        lambda: ledger.grow([request, request], [4, 4]),
        lambda: ledger.release([request, request]),
        lambda: ledger.blocks(-1),
        lambda: ledger.append(request, [1]),
    ):
        with pytest.raises(BlockError):
            wrong()
    assert ledger.num_tokens(request) == 3


# ── what stays cached ─────────────────────────────────────────────────────────────────


def test_only_computed_blocks_stay_cached() -> None:
    prompt = Prompt.of(tokens(10))
    for computed, hit in ((None, 8), (0, 0), (5, 4)):
        ledger = ledger_of(layer("a", tokens=2))
        ledger.release(ledger.admit(prompt).request, computed_tokens=computed)
        assert ledger.hit_tokens(prompt) == hit


def test_a_prompt_can_be_found_while_its_request_still_runs() -> None:
    ledger = ledger_of(layer("a", tokens=2))
    prompt = Prompt.of(tokens(10))
    first = ledger.admit(prompt).request
    assert ledger.hit_tokens(prompt) == 0, "not before it is computed"
    ledger.grow(first, 11)
    second = ledger.admit(prompt)
    assert second.hit_tokens == 8
    assert np.array_equal(ledger.blocks(first)[0].ids[:4], ledger.blocks(second.request)[0].ids[:4])


def test_outputs_can_be_found_once_their_tokens_are_told() -> None:
    ledger = ledger_of(layer("a", tokens=2))
    ids = tokens(12)
    request = ledger.admit(Prompt.of(ids[:5])).request
    ledger.grow(request, 12)
    ledger.append(request, ids[5:9])
    ledger.append(request, ids[9:])
    ledger.release(request)
    assert ledger.hit_tokens(Prompt.of([*ids, 1])) == 12


def test_the_same_prompt_computed_twice_is_cached_once() -> None:
    ledger = ledger_of(layer("a", tokens=2))
    prompt = Prompt.of(tokens(10))
    one, two = ledger.admit(prompt).request, ledger.admit(prompt).request
    ledger.release([one, two])
    assert ledger.pool.num_cached(0) == 5


def test_a_window_does_not_go_on_in_a_row_that_was_quarantined() -> None:
    ledger = ledger_of(layer("a", Window(2), tokens=1))
    request = ledger.admit(3).request
    ledger.grow(request, 4)
    left = ledger.blocks(request)[0].ids[:1]
    ledger.pool.quarantine(0, left)
    ledger.pool.unquarantine(0, left)
    ledger.grow(request, 5)
    last = ledger.blocks(request)[0].ids[-1:]
    ledger.pool.keep(0, last)
    ledger.check()


def test_requests_belong_to_the_thread_that_owns_the_pool() -> None:
    ledger = ledger_of(layer("a", tokens=4))
    request = ledger.admit(Prompt.of(tokens(5))).request
    changes = (
        lambda: ledger.admit(3),
        lambda: ledger.grow(request, 6),
        lambda: ledger.append(request, [1]),
        lambda: ledger.received(request),
        lambda: ledger.fork(request),
        lambda: ledger.release(request),
    )
    with ThreadPoolExecutor(1) as other:
        for change in changes:
            with pytest.raises(WrongThread, match="thread"):
                other.submit(change).result()
        assert other.submit(ledger.num_tokens, request).result() == 5
    ledger.release(request)
    ledger.check()


def test_check_names_requests_and_prefixes_that_do_not_agree_with_the_pool() -> None:
    ledger = ledger_of(layer("a", tokens=2))
    request = ledger.admit(Prompt.of(tokens(6))).request
    ledger.grow(request, 7)
    ledger.check()
    first, second = ledger.blocks(request)[0].ids[:2].tolist()
    ledger.pool._of[0][1].state[first] = NEW
    with pytest.raises(BlockError, match=f"block {first} can be found and is not kept"):
        ledger.check()
    ledger.pool._of[0][1].state[first] = KEPT
    ledger._tables[0]._ids[0, 0] = second
    with pytest.raises(BlockError, match="1 ids are in one request twice") as caught:
        ledger.check()
    assert f"block {second} is in 2 requests and has 1 holds" in str(caught.value)


@pytest.mark.parametrize("length", range(4, 44, 4))
def test_what_windows_left_behind_is_not_found_where_a_request_was_received(length):
    ledger = ledger_of(layer("full", tokens=4), layer("window", Window(8), tokens=4))
    request = ledger.admit(Prompt.of(range(40))).request
    ledger.received(request)
    assert ledger.blocks(request)[1].index.tolist() == [8, 9]
    ledger.grow(request, 41)
    ledger.release(request)
    again = ledger.admit(Prompt.of([*range(length), 999]))
    assert again.hit_tokens == (40 if length == 40 else 0)


# ── checkpoints of states ─────────────────────────────────────────────────────────────


def test_without_room_no_checkpoint_is_made_for_others() -> None:
    ledger = ledger_of(*RECURRENT, num_slabs=3)
    request = ledger.admit(Prompt.of(tokens(12)), num_tokens=4).request
    ledger.pool.hold(1, ledger.pool.num_free(1))
    assert ledger.grow(request, 5) == ()
    ledger.check()


def test_a_state_that_was_quarantined_is_no_checkpoint_for_others() -> None:
    ledger = ledger_of(layer("a", tokens=2), state("b", tokens=4))
    prompt = Prompt.of(tokens(12))
    request = ledger.admit(prompt, num_tokens=4).request
    running = ledger.blocks(request)[1].ids
    ledger.pool.quarantine(1, running)
    ledger.pool.unquarantine(1, running)
    assert ledger.grow(request, 8) == ()
    ledger.release(request)
    assert ledger.hit_tokens(prompt) == 0
