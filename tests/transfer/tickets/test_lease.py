"""Leases: they end once, on time, for a reason, and never hide each other."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import TransferError
from kvstow.transfer.tickets.lease import Lease, Leases

TICKET = b"signature of the ticket"


def made(leases: Leases, id: int, *, seconds: float = 10, readers: int | None = 1, now: float = 0):
    """Grant a lease; the list its end is noted in."""
    ended: list[str] = []
    ticket: Any = SimpleNamespace(lease=id, signature=TICKET, lease_seconds=seconds)
    leases.grant(Lease(ticket, readers, now + seconds, ended.append))
    return ended


def expired(leases: Leases, now: float) -> set[int]:
    """The leases that run out."""
    before = set(leases._running)
    leases.expire(now=now)
    return before - set(leases._running)


def test_a_lease_runs_out_when_its_time_is_over_and_not_before():
    leases = Leases()
    ended = made(leases, 1)
    assert expired(leases, 9.99) == set()
    assert ended == []
    assert expired(leases, 10) == {1}
    assert ended == ["expired"]
    with pytest.raises(TransferError, match="expired") as caught:
        leases.open(1, TICKET, "reader", now=10)
    assert caught.value.kind == "expired"


def test_a_lease_that_has_ended_keeps_no_other_from_running_out():
    leases = Leases()
    ended = made(leases, 1)
    made(leases, 2)
    leases.end(1, "withdrawn")
    assert expired(leases, 10) == {2}
    assert ended == ["withdrawn"]


def test_the_last_reader_that_accepts_ends_the_lease():
    leases = Leases()
    ended = made(leases, 1, readers=2)
    for reader in "ab":
        leases.open(1, TICKET, reader, now=0)
    leases.shut(1, "a", accepted=True)
    assert ended == []
    leases.shut(1, "b", accepted=True)
    assert ended == ["read"]
    with pytest.raises(TransferError, match="all readers that it was for have pulled it") as caught:
        leases.open(1, TICKET, "c", now=0)
    assert caught.value.kind == "used"


def test_a_lease_for_all_ranks_of_a_consumer_ends_with_the_last_of_them():
    leases = Leases()
    ended = made(leases, 1, readers=None)
    leases.open(1, TICKET, "first try of a", now=0, ranks=2)
    leases.shut(1, "first try of a", accepted=False)
    for reader in "ab":
        assert ended == []
        leases.open(1, TICKET, reader, now=0, ranks=2)
        leases.shut(1, reader, accepted=True)
    assert ended == ["read"]


def test_more_readers_than_were_promised_are_refused():
    leases = Leases()
    made(leases, 1, readers=1)
    leases.open(1, TICKET, "a", now=0)
    with pytest.raises(TransferError, match="1 readers may still come, 1 read") as caught:
        leases.open(1, TICKET, "b", now=0)
    assert caught.value.kind == "used"


def test_another_reader_may_come_where_one_has_failed_and_one_may_ask_twice():
    leases = Leases()
    made(leases, 1)
    leases.open(1, TICKET, "a", now=0)
    leases.open(1, TICKET, "a", now=0)
    leases.shut(1, "a", accepted=False)
    assert leases.open(1, TICKET, "b", now=0).reading == {"b"}


def test_what_has_ended_is_remembered_the_last_of_it(monkeypatch):
    monkeypatch.setattr("kvstow.transfer.tickets.lease.MAX_REMEMBERED", 2)
    leases = Leases()
    for id in (1, 2, 3):
        made(leases, id)
        assert not leases.has_ended(id)
        leases.end(id, "withdrawn")
        assert leases.has_ended(id)
    assert [leases.has_ended(id) for id in (1, 2, 3, 4)] == [False, True, True, False]


def test_a_ticket_that_was_not_given_out_is_refused():
    leases = Leases()
    made(leases, 1)
    for id, digest in ((1, b"another"), (2, TICKET)):
        with pytest.raises(TransferError) as caught:
            leases.open(id, digest, "a", now=0)
        assert caught.value.kind == "ticket"


def test_a_lease_that_is_not_known_yet_may_still_come_and_one_that_has_ended_may_not():
    leases = Leases()
    made(leases, 1)
    leases.end(1, "withdrawn")
    for id, is_early in ((1, False), (2, True)):
        assert leases.is_early(id) == is_early
        with pytest.raises(TransferError):
            leases.find(id)


def test_opening_renews():
    leases = Leases()
    ended = made(leases, 1)
    leases.open(1, TICKET, "a", now=9)
    leases.expire(now=18.9)
    assert ended == []


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("grant"), st.floats(0.1, 5)),
            st.tuples(st.just("renew"), st.integers(0, 20)),
            st.tuples(st.just("end"), st.integers(0, 20)),
            st.tuples(st.just("pass"), st.floats(0.1, 3)),
        )
    )
)
def test_leases_agree_with_a_list_that_is_scanned(steps):
    leases, now, running, ends = Leases(), 0.0, {}, {}
    for what, amount in steps:
        if what == "grant":
            id = len(ends)
            ends[id] = made(leases, id, seconds=amount, now=now)
            running[id] = (now + amount, amount)
        elif what == "renew" and amount in running:
            running[amount] = (now + running[amount][1], running[amount][1])
            leases.renew(amount, now=now)
        elif what == "end" and amount in running:
            del running[amount]
            leases.end(amount, "withdrawn")
        elif what == "pass":
            now += amount
            over = {id for id, (deadline, _) in running.items() if deadline <= now}
            assert expired(leases, now) == over
            running = {id: entry for id, entry in running.items() if id not in over}
        assert len(leases) == len(running)
    assert all(len(ended) == (id not in running) for id, ended in ends.items())


def test_whoever_did_not_read_ends_no_lease():
    leases = Leases()
    ended = made(leases, 1)
    leases.open(1, TICKET, "reader", now=0)
    leases.shut(1, "somebody else", accepted=True)
    leases.shut(2, "reader", accepted=True)
    assert ended == []
    leases.shut(1, "reader", accepted=True)
    leases.shut(1, "reader", accepted=True)
    assert ended == ["read"]


def test_a_reader_that_gives_up_leaves_the_lease_to_its_siblings():
    leases = Leases()
    ended = made(leases, 1, readers=2)
    leases.open(1, TICKET, "a", now=0)
    leases.open(1, TICKET, "b", now=0)
    leases.give_up(1, "a")
    assert ended == []
    with pytest.raises(TransferError, match="1 readers may still come, 1 read"):
        leases.open(1, TICKET, "c", now=0)
    leases.shut(1, "b", accepted=True)
    assert ended == ["read"]


@pytest.mark.parametrize("readers", [1, None])
def test_a_lease_ends_with_the_last_reader_that_could_come(readers):
    leases = Leases()
    ended = made(leases, 1, readers=readers)
    leases.give_up(1, "a")
    leases.give_up(2, "a")
    assert ended == ["aborted"]


def test_a_lease_that_is_granted_again_has_not_ended():
    leases = Leases()
    made(leases, 1)
    leases.expire(now=10)
    assert leases.has_ended(1)
    made(leases, 1, now=20)
    assert not leases.has_ended(1)
    assert expired(leases, 29) == set()
    assert expired(leases, 30) == {1}


def test_leases_are_those_that_run():
    leases = Leases()
    assert 1 not in leases
    made(leases, 1)
    assert 1 in leases
    assert 2 not in leases
    leases.end(1, "withdrawn")
    assert 1 not in leases


def test_who_gives_up_before_the_lease_is_known_counts_when_it_is(monkeypatch):
    monkeypatch.setattr("kvstow.transfer.tickets.lease.MAX_REMEMBERED", 2)
    leases = Leases()
    for id in (1, 2, 2, 3):
        leases.give_up(id, "a")
    assert made(leases, 1) == []  # forgotten: more is not remembered
    assert made(leases, 2, readers=3) == []
    leases.give_up(2, "b")
    assert 2 not in leases
    assert made(leases, 3) == ["aborted"]
    assert made(leases, 3, now=20) == []


def test_a_lease_that_is_granted_after_all_were_closed_ends_at_once():
    """It was granted while its agent was closed, and nothing was left that could end it."""
    leases = Leases()
    before = made(leases, 1)
    leases.close()
    after = made(leases, 2)
    assert before == after == ["closed"]
    assert not len(leases)
    assert leases.has_ended(2)


def test_a_lease_that_cannot_be_given_back_keeps_no_other_from_its_end():
    leases = Leases()
    ended = [made(leases, id) for id in (1, 2, 3)]
    leases._running[2].on_end = lambda reason: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        leases.close()
    assert ended == [["closed"], [], ["closed"]]
