"""What is owed to the owner of blocks is done in order, whoever does it."""

import threading

from kvstow.transfer.tickets.owner import Generations, OwnerQueue
from transfer_node import hybrid_layout


def test_two_threads_that_settle_do_what_is_owed_once_and_in_order():
    """One of them used to find nothing where something had been a moment before, or did the second
    thing while the other was still at the first."""
    queue = OwnerQueue(Generations(hybrid_layout()), lambda error: None)
    done: list[int] = []
    is_in, may_end = threading.Event(), threading.Event()

    def first() -> None:
        is_in.set()
        assert may_end.wait(10)
        done.append(1)

    queue.defer(first)
    queue.defer(lambda: done.append(2))
    other = threading.Thread(target=queue.settle)
    other.start()
    assert is_in.wait(10)
    queue.settle()
    assert done == []
    may_end.set()
    other.join()
    assert done == [1, 2]


def test_what_is_owed_may_settle_itself():
    queue = OwnerQueue(Generations(hybrid_layout()), lambda error: None)
    done: list[int] = []
    queue.defer(queue.settle)
    queue.defer(lambda: done.append(1))
    queue.settle()
    assert done == [1]
