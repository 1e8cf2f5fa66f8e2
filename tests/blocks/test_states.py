"""States: the running row, and checkpoints that others start from."""

from block_layouts import RECURRENT, layer, ledger_of, state, tokens
from kvstow.blocks.prompt import Prompt
from kvstow.blocks.table import RowCopy


def test_a_request_that_starts_from_a_checkpoint_copies_it_first() -> None:
    ledger = ledger_of(layer("a", tokens=2), state("b", tokens=4), state("c", tokens=4))
    ids = tokens(10)
    first = ledger.admit(Prompt.of(ids), num_tokens=4)
    assert first.copies == ()
    (checkpoint,) = ledger.grow(first.request, 8)
    ledger.grow(first.request, 10)
    ledger.release(first.request)
    again = ledger.admit(Prompt.of(ids[:6]))
    assert again.hit_tokens == 4
    assert again.copies == (
        RowCopy(1, checkpoint.destination, int(ledger.blocks(again.request)[1].ids[0])),
    )


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
