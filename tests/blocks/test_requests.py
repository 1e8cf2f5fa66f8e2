"""Requests: slots as they come, and handles that outlive nobody."""

import pytest

from block_layouts import HYBRID, layer, ledger_of
from kvstow.errors import BlockError


def test_a_released_requests_handle_is_not_taken_for_another_one() -> None:
    ledger = ledger_of(layer("a"))
    old = ledger.admit(3).request
    ledger.release(old)
    new = ledger.admit(3).request
    assert new != old
    for call in (ledger.release, ledger.blocks, ledger.num_tokens, ledger.fork):
        with pytest.raises(BlockError, match=f"request {old} is not known"):
            call(old)
    with pytest.raises(BlockError):
        ledger.grow([new, old], [4, 4])
    assert ledger.num_tokens(new) == 3


def test_what_is_no_handle_is_refused_with_what_to_do() -> None:
    ledger = ledger_of(layer("a"))
    admission = ledger.admit(3)
    for wrong, kind in ((admission, "Admission"), (0.5, "float"), ("0", "str"), (None, "NoneType")):
        for call in (ledger.release, ledger.blocks, ledger.num_tokens, ledger.fork):
            with pytest.raises(BlockError, match=rf"not by {kind}\n\nhint: .*\.request"):
                call(wrong)


def test_a_step_of_no_requests_changes_nothing() -> None:
    ledger = ledger_of(*HYBRID)
    ledger.admit(3)
    ledger.release([])
    assert ledger.grow([], []) == ()
    ledger.received([])
    assert len(ledger) == 1
    ledger.check()


def test_hundreds_of_requests_get_slots_as_they_come() -> None:
    ledger = ledger_of(*HYBRID, num_slabs=3000, caching=False)
    handles = [ledger.admit(1 + i % 7).request for i in range(500)]
    assert len(set(handles)) == len(ledger) == 500
    ledger.grow(handles, [8] * 500)
    ledger.check()
    ledger.release(handles[::2])
    assert len(ledger) == 250
    ledger.release(handles[1::2])
    assert ledger.pool.num_held(0) == ledger.pool.num_held(1) == 0


def test_a_fork_gets_a_slot_where_all_are_taken() -> None:
    ledger = ledger_of(layer("a"), num_slabs=100)
    handles = [ledger.admit(1).request for _ in range(64)]
    assert ledger.fork(handles[0]).request not in handles
    assert len(ledger) == 65
