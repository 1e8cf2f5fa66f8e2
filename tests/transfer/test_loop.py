"""The loop: stories wait, wake, end and fail one by one."""

import logging
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from kvstow.errors import TransferError
from kvstow.transfer.channel.messages import Begun, Stopped
from kvstow.transfer.loop import IDLE, MAX_UNREAD, Loop, Mailbox, Task, together


class Silence:
    """A channel on which nobody speaks; it notes how long it was listened to."""

    def __init__(self) -> None:
        self.waits: list[int] = []

    def heard(self, timeout_ms: int) -> Iterator[Any]:
        self.waits.append(timeout_ms)
        return iter(())

    def watch(self, fd: int) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loop(clock: Clock) -> Iterator[Loop]:
    made = Loop("test", Silence(), clock, hear=lambda line, message: None, progress=lambda: None)
    yield made
    made.close()


def counting(seen: list[Any], *waits: float, result: Any = None):
    """A story that notes every resumption."""
    for wait in waits:
        seen.append(wait)
        yield wait
    return result


def failing(error: Exception):
    yield 0.0
    raise error


def test_a_story_is_resumed_when_its_time_has_come_and_not_before(loop, clock):
    seen: list[float] = []
    task = loop.start("story", counting(seen, 1.0, 2.0, result="end"))
    loop.step()
    loop.step()
    assert seen == [1.0]
    clock.now = 1.0
    loop.step()
    assert seen == [1.0, 2.0]
    task.wake()
    loop.step()
    assert (task.is_over, task.result) == (True, "end")
    assert loop.tasks == []


def test_an_error_ends_its_own_story_and_no_other(loop, clock, caplog):
    seen: list[float] = []
    fault = loop.start("fault", failing(TransferError("no", kind="peer")))
    mistake = loop.start("mistake", failing(KeyError("a bug")))
    healthy = loop.start("healthy", counting(seen, 0.0, 0.0, 0.0, result=7))
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            loop.step()
    assert (healthy.result, healthy.error) == (7, None)
    assert fault.error.kind == "peer"
    assert "a bug" in str(mistake.error)
    assert "ended by a bug" in caplog.text


def test_an_error_of_a_message_or_a_command_is_logged_and_nobody_elses(clock, caplog):
    class Speaking(Silence):
        def heard(self, timeout_ms: int) -> Iterator[Any]:
            return iter([("line", Begun(1)), ("line", Begun(2))])

    heard: list[int] = []

    def hear(line: str, message: Begun) -> None:
        heard.append(message.transfer)
        raise ValueError("cannot be read")

    def breaking() -> None:
        raise RuntimeError("an engine that breaks")

    loop = Loop("test", Speaking(), clock, hear=hear, progress=breaking)
    task = loop.start("healthy", counting([], 0.0, result=1))
    loop.submit(breaking)
    loop.step()
    loop.step()
    assert heard == [1, 2, 1, 2]
    assert task.result == 1
    loop.close()


def test_only_the_first_interrupt_reaches_a_story_and_it_may_clean_up(loop):
    caught: list[str] = []

    def story():
        try:
            yield 100.0
        except TransferError as error:
            caught.append(str(error))
        yield 100.0
        return "cleaned up"

    task = loop.start("story", story())
    loop.step()
    task.interrupt(TransferError("first", kind="aborted"))
    task.interrupt(TransferError("second", kind="aborted"))
    loop.step()
    task.interrupt(TransferError("third", kind="aborted"))
    task.wake()
    loop.step()
    assert caught == ["first"]
    assert task.result == "cleaned up"


def test_a_deadline_interrupts_a_story_that_waits_for_longer(loop, clock):
    task = loop.start("slow", counting([], 100.0, 100.0))
    task.deadline = 5.0
    task.late = lambda: TransferError("too late", kind="timeout")
    loop.step()
    clock.now = 5.1
    loop.step()
    assert task.error.kind == "timeout"


def test_stories_together_end_with_all_results_and_the_first_error_closes_the_others(loop):
    both = loop.start(
        "both", together(counting([], 0.0, result=1), counting([], 0.0, 0.0, result=2))
    )
    closed: list[bool] = []

    def closing():
        try:
            yield 0.0
            yield 0.0
            yield 0.0
        finally:
            closed.append(True)

    torn = loop.start("torn", together(closing(), failing(TransferError("no", kind="peer"))))
    for _ in range(5):
        loop.step()
    assert both.result == [1, 2]
    assert torn.error.kind == "peer"
    assert closed == [True]


def test_so_many_stories_run_at_once_as_were_asked_for(loop):
    running: list[int] = []
    most: list[int] = []

    def story(number: int):
        running.append(number)
        most.append(len(running))
        yield 0.0
        running.remove(number)
        return number

    task = loop.start("all", together(*(story(i) for i in range(7)), at_once=3))
    for _ in range(20):
        loop.step()
    assert task.result == list(range(7))
    assert max(most) == 3


def test_a_mailbox_keeps_messages_by_kind_and_wakes_its_story():
    woken: list[bool] = []
    mailbox = Mailbox(lambda: woken.append(True))
    waiting = mailbox.wait(Begun)
    next(waiting)
    mailbox.put(Stopped(1))
    next(waiting)
    mailbox.put(Begun(2))
    mailbox.put(Begun(3))
    with pytest.raises(StopIteration) as end:
        next(waiting)
    assert end.value.value == Begun(2)
    assert mailbox.take(Begun) == Begun(3)
    assert mailbox.has(Stopped)
    assert not mailbox.has(Begun)
    assert len(woken) == 3


def test_a_mailbox_that_overflows_says_so():
    mailbox = Mailbox(lambda: None)
    for number in range(MAX_UNREAD):
        mailbox.put(Begun(number))
    with pytest.raises(TransferError, match="256 Begun messages are unread"):
        mailbox.put(Begun(0))


def test_a_closed_loop_takes_nothing(loop):
    loop.close()
    with pytest.raises(TransferError, match="closed"):
        loop.submit(lambda: None)
    loop.wake()


def test_a_story_that_is_interrupted_before_its_first_turn_still_cleans_up(loop):
    """A generator that has not begun would end outside of its own `try`."""
    ended: list[str] = []

    def story() -> Any:
        try:
            while True:
                yield IDLE
        finally:
            ended.append("cleaned up")

    task = loop.start("story", story())
    task.interrupt(TransferError("no", kind="aborted"))
    loop.step()
    loop.step()
    assert task.is_over
    assert task.error is not None
    assert ended == ["cleaned up"]


@pytest.mark.parametrize(
    ("seconds", "milliseconds"),
    [
        (0.0, 0),
        (20e-6, 0),
        (20.1e-6, 0),
        (0.0009, 1),
        (0.001, 1),
        (0.0195, 20),
    ],
)
def test_a_turn_listens_for_as_long_as_it_may_wait(clock, seconds: float, milliseconds: int):
    """A message that comes within a part of a millisecond ends the wait: a sleep would not."""
    channel = Silence()
    loop = Loop("test", channel, clock, hear=lambda line, message: None, progress=lambda: None)
    loop.step(seconds)
    loop.close()
    assert channel.waits == [milliseconds]


def test_an_interrupt_that_waits_does_not_reach_a_story_that_is_ending():
    def story():
        try:
            raise TransferError("it failed as it began", kind="transport")
        except TransferError:
            task.shield()
            yield 0.0
        return "ended in its own time"

    task = Task("t", story())
    task.interrupt(TransferError("stop", kind="aborted"))
    task.resume(1.0)
    task.resume(2.0)
    assert (task.result, task.error) == ("ended in its own time", None)


def test_a_forked_process_is_refused_at_once_and_can_close_what_it_has_not(loop):
    """It has no thread that would obey: its pulls, and its end, waited for ever."""
    loop.run(lambda: None)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it forks beside a thread
        child = os.fork()
    if not child:
        try:
            threading.Timer(20, os._exit, [1]).start()
            try:
                loop.submit(lambda: None)
            except TransferError as error:
                os.write(writing, f"{error}, stopped {loop.stop()}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    assert f"was made by process {os.getpid()}" in said
    assert said.endswith("hint: make the agent after the fork, stopped False")
    assert loop.stop()


def test_a_callback_that_fails_is_called_once_and_holds_up_nobody(loop, caplog):
    calls: list[bool] = []

    def fails() -> None:
        calls.append(True)
        raise RuntimeError("a callback that breaks")

    loop.start("first", counting([])).on_end = fails
    behind = loop.start("behind", counting([], 0.0, result=7))
    for _ in range(3):
        loop.step()
    assert (calls, behind.result, loop.tasks) == ([True], 7, [])
    assert "a callback that breaks" in caplog.text


# ── futures ───────────────────────────────────────────────────────────────────────────


def late() -> TransferError:
    return TransferError("too late", kind="timeout")


def test_a_future_has_what_its_story_returns_or_raises(loop, clock):
    good = loop.future(Task("good"), counting([], 0.0, result=7), seconds=5.0, late=late)
    bad = loop.future(
        Task("bad"), failing(TransferError("no", kind="peer")), seconds=5.0, late=late
    )
    slow = loop.future(Task("slow"), counting([], *[100.0] * 9), seconds=5.0, late=late)
    loop.step()
    loop.step()
    assert good.result(0) == 7
    assert bad.exception(0).kind == "peer"
    clock.now = 5.1
    loop.step()
    assert slow.exception(0).kind == "timeout"


def test_the_story_of_a_future_that_is_cancelled_ends(loop):
    early, begun = (
        loop.future(Task("f"), counting([], 9.0), seconds=99.0, late=late) for _ in range(2)
    )
    assert early.cancel()
    loop.step()
    assert len(loop.tasks) == 1
    assert begun.cancel()
    behind = loop.start("behind", counting([], 0.0, result=7))
    for _ in range(3):
        loop.step()
    assert (behind.result, loop.tasks) == (7, [])


def test_what_is_under_way_when_a_loop_is_closed_ends_with_an_error(loop):
    ended: list[bool] = []
    begun = loop.future(Task("begun"), counting([], 9.0), seconds=99.0, late=late)
    loop.step()
    task = loop.start("story", counting([], 9.0))
    task.on_end = lambda: ended.append(True)
    submitted = loop.future(Task("submitted"), counting([], 9.0), seconds=99.0, late=late)
    loop.close()
    for future in (begun, submitted):
        assert future.exception(0).kind == "aborted"
    assert task.error.kind == "aborted"
    assert (ended, loop.tasks) == ([True], [])


def test_a_command_that_is_submitted_while_a_loop_is_closed_is_obeyed_or_refused(loop):
    obeyed: list[str] = []
    refused: list[TransferError] = []

    def submits_another() -> None:
        obeyed.append("first")
        try:
            loop.submit(lambda: obeyed.append("second"))
        except TransferError as error:
            refused.append(error)

    loop.submit(submits_another)
    loop.close()
    assert obeyed == ["first"]
    assert len(refused) == 1
