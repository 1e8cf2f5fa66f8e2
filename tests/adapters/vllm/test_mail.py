"""Datagrams within one machine."""

import time
from dataclasses import replace
from threading import Timer

from kvstow.adapters.vllm.mail import MAX_BYTES, NOWHERE, Inbox


def test_messages_arrive_in_order_and_nothing_is_nothing():
    inbox = Inbox()
    assert inbox.address.send({"number": 1})
    assert inbox.address.send((2, b"bytes"))
    assert [inbox.receive(1), inbox.receive(1), inbox.receive(0)] == [
        {"number": 1},
        (2, b"bytes"),
        None,
    ]
    inbox.close()


def test_what_has_another_mark_is_passed_over():
    inbox = Inbox()
    replace(inbox.address, secret=b"another").send("forged")
    inbox.address.send("ours")
    assert inbox.receive(1) == "ours"
    inbox.close()


def test_who_sends_knows_what_does_not_lie_in_an_inbox():
    inbox = Inbox()
    assert not inbox.address.send(bytes(MAX_BYTES))
    assert not NOWHERE.send("nobody")
    inbox.close()
    assert not inbox.address.send("too late")


def test_who_waits_is_woken():
    inbox, began = Inbox(), time.monotonic()
    Timer(0.05, inbox.address.wake).start()
    assert inbox.receive(30) is None
    assert time.monotonic() - began < 20
    inbox.close()
