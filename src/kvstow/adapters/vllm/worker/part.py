"""What a rank is made of: parts with the same verbs, called in every step of the engine."""

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field

from kvstow.adapters.vllm.counts import EngineCounts
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import StepOrders, StepResults
from kvstow.memory.arena import Arena


@dataclass(slots=True, kw_only=True, eq=False)
class RankState:
    """One rank, as all its parts see it. With `after_steps`, steps that the engine has begun may
    still write to blocks that it gives for a load: those are waited for. `by_hand`: any step may be
    the last one for long. `wake` is called, in any thread, when a request may be told something."""

    arena: Arena
    options: ConnectorOptions
    name: str
    after_steps: bool = False
    by_hand: bool = False
    counts: EngineCounts = field(default_factory=EngineCounts)
    wake: Callable[[], None] = lambda: None


Task = Generator[None]
"""Something that waits: read from top to bottom, resumed until it is over."""


class Tasks:
    """What a part has under way."""

    def __init__(self) -> None:
        self._running: list[Task] = []

    def __len__(self) -> int:
        """Those that are not over."""
        return len(self._running)

    def begin(self, task: Task) -> None:
        """Do what can be done of it at once."""
        if next(task, self) is not self:
            self._running.append(task)

    def resume(self) -> None:
        """Go on with all, as far as they can."""
        self._running = [task for task in self._running if next(task, self) is not self]

    def end(self, error: Exception | None = None) -> None:
        """End all where they are, by that error for those that want to know of one."""
        ending = error or GeneratorExit()
        for task in self._running:
            with suppress(StopIteration, type(ending)):
                task.throw(ending)
        self._running = []


class RankPart:
    """Something that a rank does for its scheduler's side. A verb does nothing unless a part
    says otherwise."""

    def begin(self, step: StepOrders) -> None:
        """Do what cannot wait for the engine to start its computation."""

    def load(self, step: StepOrders) -> None:
        """Start what writes to blocks that nothing else uses, or asks for something. An
        accelerator has been given the step's computation by now."""

    def save(self, step: StepOrders) -> None:
        """Start to store what the scheduler's side has decided, after the engine's computation."""

    def has_news(self) -> bool:
        """Whether a request that waits can be told something."""
        return False

    def report(self, results: StepResults) -> None:
        """Add what has ended since the last time."""

    def close(self) -> None:
        """Let go of everything."""
