"""The loop: routines that wait, driven in one thread, each in its own `try`.

A routine is a generator. It yields how many seconds it can wait before it wants to look again;
a message for it, an interrupt or `wake` resumes it earlier. What goes wrong in a routine ends that
routine and no other.

    task = loop.start("pull", pull(...))
    loop.step(0.02)     one turn, in the caller's thread
    loop.run()          turn after turn in a thread of its own, until `close`
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast

from kvstow.errors import TransferError
from kvstow.threads import guarded_thread
from kvstow.transfer.channel.framing import Channel, Session
from kvstow.transfer.channel.messages import AnyMessage

log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M")

Routine = Generator[float, None, T]
Command = tuple[Callable[[], object], Callable[[TransferError], None]]

AT_ONCE = 0.0
"""Ask again without a pause: a post is under way, and some engines move bytes only then."""

SOON = 20e-6
NOW_AND_THEN = 1e-3
IDLE = 0.02
"""Nothing but a message is expected."""

AFTER_ERROR = 1.0
"""How long what goes on for ever waits after a turn that has raised."""

WORK_SECONDS = 50e-6
"""Engine progress that took so long was for a peer, which will need more of it."""

MAX_UNREAD = 256
"""Messages of one kind that a routine may leave unread; more are refused."""


class Task(Generic[T]):
    """A routine under way, and what came of it once `is_over`. Whoever wakes or interrupts it may
    know it before the routine begins.

    After `deadline` it is interrupted with the error that `late` makes. The loop calls `on_end`
    once, when it is over.
    """

    def __init__(self, name: str, routine: Routine[T] | None = None) -> None:
        self.name = name
        self.routine = routine
        self.due = 0.0
        self.deadline = math.inf
        self.late = lambda: TransferError(f"{name}: no end in time", kind="timeout")
        self.is_over = False
        self.result: T | None = None
        self.error: TransferError | None = None
        self.on_end: Callable[[], None] = lambda: None
        self._interrupt: TransferError | None = None
        self._may_interrupt = True
        self._has_begun = False

    def wake(self) -> None:
        """Resume the routine in the next turn."""
        self.due = 0.0

    def interrupt(self, error: TransferError) -> None:
        """Raise an error where the routine waits. Only the first interrupt counts."""
        if self._may_interrupt:
            self._may_interrupt = False
            self._interrupt = error
            self.due = 0.0

    def shield(self) -> None:
        """No deadline and no interrupt reaches the routine from now on, not even one that waits: it
        is ending."""
        self._may_interrupt, self._interrupt, self.deadline = False, None, math.inf

    def resume(self, now: float) -> None:
        """Let the routine go on until it waits again, ends or fails."""
        if now > self.deadline:
            self.interrupt(self.late())
        error: TransferError | None = None
        if self._has_begun:  # before, it would end outside of its own try
            error, self._interrupt = self._interrupt, None
        self._has_begun = True
        routine = self.routine
        assert routine is not None
        try:
            wait = next(routine) if error is None else routine.throw(error)
            self.due = now + wait if self._interrupt is None else 0.0
        except StopIteration as end:
            self.result, self.is_over = end.value, True
        except TransferError as failure:
            self.error, self.is_over = failure, True
        except Exception as failure:
            log.exception("%s: ended by a bug", self.name)
            self.error, self.is_over = bug(self.name, failure), True

    def close(self, error: TransferError) -> None:
        """Drop the routine where it stands; it has failed with this error."""
        self.error, self.is_over = error, True
        if self.routine is not None:
            self.routine.close()


def bug(what: str, error: Exception) -> TransferError:
    """The error that callers see for an exception that is a bug of ours."""
    return TransferError(f"{what}: {error!r}", kind="transport")


# ── what routines wait for ─────────────────────────────────────────────────────────────


def together(*routines: Routine[T], at_once: int = 0) -> Routine[list[T]]:
    """Run routines side by side, all or so many `at_once`; their results, in order.

    The first error closes the others and is raised.
    """
    waiting = deque(enumerate(routines))
    running: dict[int, Routine[T]] = {}
    results: dict[int, T] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (at_once or len(routines)):
                number, routine = waiting.popleft()
                running[number] = routine
            wait = IDLE
            for number, routine in tuple(running.items()):
                try:
                    wait = min(wait, next(routine))
                except StopIteration as end:
                    results[number] = end.value
                    del running[number]
                    wait = AT_ONCE if waiting else wait
            if running:
                yield wait
    finally:
        for routine in (*running.values(), *(routine for _, routine in waiting)):
            routine.close()
    return [results[number] for number in range(len(routines))]


def result_of(future: "Future[T]") -> Routine[T]:
    """Wait for another thread's result; its error raised."""
    while not future.done():
        yield IDLE
    return future.result()


class Mailbox:
    """Messages for one routine, in the order in which they came."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._messages: dict[type, deque[Any]] = {}

    def put(self, message: AnyMessage) -> None:
        """Leave a message and wake the routine. TransferError where too many are unread."""
        kept = self._messages.setdefault(type(message), deque())
        if len(kept) >= MAX_UNREAD:
            kind = type(message).__name__
            raise TransferError(f"{MAX_UNREAD} {kind} messages are unread", kind="transport")
        kept.append(message)
        self._wake()

    def has(self, kind: type) -> bool:
        """Whether a message of this kind is there."""
        return bool(self._messages.get(kind))

    def first(self, kind: type[M]) -> M:
        """The oldest message of a kind, which stays; one must be there."""
        return self._messages[kind][0]

    def take(self, kind: type[M]) -> M:
        """The oldest message of a kind; one must be there."""
        return self._messages[kind].popleft()

    def wait(self, kind: type[M]) -> Routine[M]:
        """Wait for a message of a kind, and take it."""
        while not self.has(kind):
            yield IDLE
        return self.take(kind)


class Conversation:
    """What a peer says to one task: about a pull, a transfer that is served, or a question. While
    it lasts, `lease` is renewed if it is not 0."""

    lease = 0

    def __init__(self, task: Task[Any]) -> None:
        self.task = task
        self.mailbox = Mailbox(task.wake)

    def hear(self, message: AnyMessage) -> None:
        """Take in what the peer says."""
        self.mailbox.put(message)

    def lose(self, error: TransferError) -> None:
        """The peer is gone."""
        self.task.interrupt(error)


# ── the loop ──────────────────────────────────────────────────────────────────────────


class Loop:
    """All tasks of one agent. `hear` takes in messages, `progress` lets the engine work, `on_error`
    is told what a message or a command was that raised, `on_broken` that the thread has ended by
    itself, in that thread."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        clock: Callable[[], float],
        *,
        hear: Callable[[Session, AnyMessage], None],
        progress: Callable[[], None],
        on_error: Callable[[str], None] = lambda what: None,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.tasks: list[Task[Any]] = []
        self.clock = clock
        self.channel = channel
        self._hear = hear
        self._progress = progress
        self._on_error = on_error
        self._on_broken = on_broken
        self._commands: deque[Command] = deque()
        self._thread: threading.Thread | None = None
        self._busy_until = 0.0
        self._closing = threading.Event()
        self._opener = os.getpid()
        self._waking = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        channel.watch(self._wake_fd)

    def start(self, name: str, routine: Routine[T]) -> Task[T]:
        """Begin a routine; in the loop's own thread."""
        return self.begin(Task(name), routine)

    def begin(self, task: Task[T], routine: Routine[T]) -> Task[T]:
        """Begin the routine of a task; in the loop's own thread."""
        task.routine = routine
        self.tasks.append(task)
        return task

    # ── from any thread ───────────────────────────────────────────────────────────

    def submit(
        self,
        command: Callable[[], object],
        on_error: Callable[[TransferError], None] = lambda error: None,
    ) -> None:
        """Have something done in the loop's thread; `on_error` is told what it raises. Raises
        TransferError once the loop is closed."""
        self.check_open()
        with self._waking:
            if self._wake_fd < 0:
                raise self._closed()
            self._commands.append((command, on_error))
            os.eventfd_write(self._wake_fd, 1)

    def future(
        self,
        task: Task[T],
        routine: Routine[T],
        *,
        seconds: float,
        late: Callable[[], TransferError],
    ) -> "Future[T]":
        """Begin the routine of a task; what it returns or raises, later. After `seconds` it is
        interrupted with the error that `late` makes, and at once if the future is cancelled."""
        answer: Future[T] = Future()

        def begin() -> None:
            if answer.cancelled():
                return
            self.begin(task, routine)
            task.deadline, task.late = self.clock() + seconds, late
            task.on_end = lambda: _tell(answer, task)
            error = TransferError(f"{task.name}: no longer needed", kind="aborted")
            answer.add_done_callback(lambda _: self.try_submit(lambda: task.interrupt(error)))

        self.submit(begin, answer.set_exception)
        return answer

    def try_submit(self, command: Callable[[], object]) -> None:
        """Have something done in the loop's thread, unless the loop is closed."""
        with suppress(TransferError):
            self.submit(command)

    def wake(self) -> None:
        """Resume every routine, if the loop still runs."""
        self.try_submit(self.wake_all)

    def check_open(self) -> None:
        """TransferError once it is closed, and in a process that was forked: that has no thread
        that would do anything."""
        if self._wake_fd < 0:
            raise self._closed()
        if os.getpid() != self._opener:
            raise TransferError(
                f"agent {self.name!r} was made by process {self._opener}, and this is process "
                f"{os.getpid()}, forked from it\n\nhint: make the agent after the fork",
                kind="refused",
            )

    def _closed(self) -> TransferError:
        return TransferError(f"agent {self.name!r} is closed", kind="aborted")

    # ── turns ─────────────────────────────────────────────────────────────────────

    @property
    def pace(self) -> float:
        """How soon a routine looks again that only lets the engine work for a peer."""
        return SOON if self.clock() < self._busy_until else NOW_AND_THEN

    def expect_work(self) -> None:
        """A peer will need the engine at once."""
        self._busy_until = self.clock() + 2 * NOW_AND_THEN

    def step(self, timeout: float = 0.0) -> float:
        """One turn: messages, commands, the engine, every routine that is due.

        Waits at most `timeout` seconds for a message; returns how long the next turn may.
        """
        milliseconds = math.ceil(timeout * 1000)
        if 0 < timeout < NOW_AND_THEN / 2:  # too short for a socket to be waited for
            time.sleep(timeout)
            milliseconds = 0
        for line, message in self.channel.heard(milliseconds):
            self._busy_until = self.clock() + NOW_AND_THEN
            self._run_commands()
            self._guarded(partial(self._hear, line, message), type(message).__name__)
        self._run_commands()
        started = self.clock()
        self._guarded(self._progress, "the engine")
        now = self.clock()
        if now - started > WORK_SECONDS:
            self._busy_until = now + NOW_AND_THEN
        for task in tuple(self.tasks):
            if task.due <= now or task.deadline < now:
                task.resume(now)
                if task.is_over:
                    self._ended(task)
        soonest = min([task.due for task in self.tasks], default=math.inf)
        return min(max(soonest - now, 0.0), IDLE)

    def _ended(self, over: Task[Any]) -> None:
        self.tasks.remove(over)
        self._guarded(over.on_end, over.name)

    def wake_all(self) -> None:
        """Resume every routine: something has happened that some of them may wait for."""
        for task in self.tasks:
            task.due = 0.0

    def _run_commands(self) -> None:
        while self._commands:
            self._guarded(partial(_run, *self._commands.popleft()), "a command")

    def _guarded(self, call: Callable[[], None], what: str) -> None:
        """What goes wrong here concerns one message or command, and nobody else."""
        try:
            call()
        except Exception as error:
            is_ours = isinstance(error, TransferError)
            log.warning("agent %s: %s: %s", self.name, what, error, exc_info=not is_ours)
            self._on_error(what)

    # ── its life ──────────────────────────────────────────────────────────────────

    def run(self, begin: Callable[[], None]) -> None:
        """Turn in a thread of its own from now on, which calls `begin` first. TransferError once it
        is closed."""
        self.check_open()
        if self._closing.is_set():
            raise self._closed()
        if self._thread is None:
            self._thread = guarded_thread(
                f"kvstow-{self.name}", partial(self._turn, begin), on_broken=self._break
            )
            self._thread.start()

    def _turn(self, begin: Callable[[], None]) -> None:
        begin()
        wait = 0.0
        while not self._closing.is_set():
            try:
                wait = self.step(wait)
            except Exception:
                log.exception("agent %s: a turn failed", self.name)
                wait = IDLE

    def _break(self, error: BaseException) -> None:
        """Its thread has ended: whoever waits for something learns of that."""
        try:
            self._on_error("the thread")
            self._on_broken()
        finally:
            self.close()

    @property
    def has_thread(self) -> bool:
        """Whether it turns by itself; otherwise only by `step`."""
        return self._thread is not None

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more turns."""
        return self._wake_fd < 0

    def stop(self) -> bool:
        """End the thread, if there is one; whether this was the first call. A process that was
        forked meanwhile has nothing to end."""
        if self._closing.is_set() or os.getpid() != self._opener:
            return False
        self._closing.set()
        self.wake()
        if self._thread is not None:
            try:
                self._thread.join()
            except BaseException:  # it still runs: whoever interrupted this stops it later
                self._closing.clear()
                raise
        return True

    def close(self) -> None:
        """Drop every routine, with an error; nothing can be submitted any more."""
        with self._waking:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
            self._wake_fd = -1
        self._run_commands()
        while self.tasks:
            task = self.tasks[0]
            self._guarded(partial(task.close, self._closed()), task.name)
            self._ended(task)


def _run(command: Callable[[], object], on_error: Callable[[TransferError], None]) -> None:
    """Do what was submitted; whoever waits for it learns of an error."""
    try:
        command()
    except Exception as error:
        on_error(error if isinstance(error, TransferError) else bug("a command", error))
        raise


def _tell(answer: "Future[T]", task: Task[T]) -> None:
    """A task has ended: so has its future, unless it was cancelled."""
    if not answer.set_running_or_notify_cancel():
        return
    if task.error is not None:
        answer.set_exception(task.error)
    else:
        answer.set_result(cast("T", task.result))
