"""Hand-overs that are over before the engine plans their request, where that takes a moment.

    a request arrives     blocks are taken from the engine's pool; every rank copies into them at
                          once, out of mapped memory, compares digests and generations, and answers
    all have accepted     the blocks enter the engine's own prefix cache under the request's hashes
    planned               the engine finds them there, as it finds whatever it has computed itself

The engine learns of bytes that were accepted, and of no others: a pull that fails leaves free
blocks, and the request is computed like any other. No step waits for a load, none is taken back.
Less than a block at the end is computed, as after every cached prefix. That is for caches of one
group, in which each token sees all before it; everything else is loaded beside the steps.
"""

import time
from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import Literal

from kvstow.adapters.vllm.counts import Count
from kvstow.adapters.vllm.engine import Request
from kvstow.adapters.vllm.mail import Inbox
from kvstow.adapters.vllm.protocol import (
    EarlyAnswer,
    EarlyOutcome,
    EarlyPull,
    Handover,
    PullBlocks,
)
from kvstow.adapters.vllm.scheduler.parts import EngineState
from kvstow.plan.retention import Full

SPARE = 16
"""A part in so many of the pool stays free of early pulls."""

MOST_TOKENS = 64
"""Of longer blocks a part, which is computed, may take longer than a load beside the steps."""

Begin = Literal["begun", "needless", "beside steps"]
"""A pull has begun; all that could be pulled is here; it is for the steps to load."""


Pull = Generator[None, EarlyOutcome, None]
"""A pull that ranks have been told of; it is sent their outcomes."""


class EarlyPulls:
    """Early pulls of one engine: a new request waits for its own for a moment, then is asked again
    in later steps."""

    def __init__(self, engine: EngineState) -> None:
        group = engine.groups[0]
        is_plain = len(engine.groups) == 1 and isinstance(group.retention, Full)
        is_on = engine.pulls_early and is_plain and group.block_tokens <= MOST_TOKENS
        self._engine = engine
        self._block_tokens = group.block_tokens
        self._seconds = engine.options.early_seconds if is_on and not engine.ahead else 0.0
        self._inbox = Inbox()
        self._numbers = count(1)
        self._running: dict[int, Pull] = {}
        self._unplanned: dict[str, int] = {}
        """By request that the engine has not planned yet, blocks that wait for it."""
        self._num_resets = 0

    def __len__(self) -> int:
        """Pulls that are not over."""
        return len(self._running)

    def begin(
        self, request: Request, handover: Handover, over: Callable[[EarlyOutcome], None]
    ) -> Begin:
        """Have every rank pull the whole blocks of a hand-over, but those that are here. `over` is
        called when a pull that has begun has ended, by `wait` or `poll`."""
        if not self._seconds:
            return "beside steps"
        size, pool = self._block_tokens, self._engine.blocks
        total = min(handover.num_tokens, len(request.all_token_ids) - 1) // size
        is_looked_for = len(request.block_hashes) >= total and not request.skip_reading_prefix_cache
        if not is_looked_for:
            return "beside steps"
        cached = pool.cached(request.block_hashes, total)
        if len(cached) == total:
            return "needless"
        pool.hold(cached)
        needed = total - len(cached)
        reserved = sum(self._unplanned.values()) + pool.num_blocks // SPARE
        if pool.num_free < needed + reserved:
            pool.release(cached)
            return "beside steps"
        blocks = [*cached, *pool.take(needed)]
        order = EarlyPull(
            number=next(self._numbers),
            pull=PullBlocks(
                request=request.request_id,
                tickets=handover.tickets,
                ids=(tuple(blocks),),
                start_token=len(cached) * size,
                num_tokens=total * size,
            ),
            answer_to=self._inbox.address,
        )
        num_ranks = sum(worker.inbox.send(order) for worker in self._engine.workers)
        if not num_ranks:
            pool.release(blocks)
            return "beside steps"
        self._running[order.number] = pull = self._pull(
            request, blocks, len(cached), num_ranks, over
        )
        next(pull)
        self._unplanned[request.request_id] = needed
        return "begun"

    def _pull(
        self,
        request: Request,
        blocks: Sequence[int],
        cached: int,
        num_ranks: int,
        over: Callable[[EarlyOutcome], None],
    ) -> Pull:
        """A pull that so many ranks were told of, until all of them have answered: the same, or it
        has failed. `cached` of its blocks hold the prompt's beginning."""
        until, resets = time.monotonic() + self._seconds, self._num_resets
        outcomes = {"accepted", "failed"} if num_ranks < len(self._engine.workers) else set[str]()
        for _ in range(num_ranks):
            outcomes.add((yield))
        outcome: EarlyOutcome = "failed"
        if outcomes == {"accepted"}:
            outcome = "accepted"
            if resets == self._num_resets:
                self._engine.blocks.enter(request, blocks, cached, self._block_tokens)
        elif outcomes == {"declined"}:
            outcome = "declined"
        if outcome != "accepted":
            self._unplanned.pop(request.request_id, None)
        self._engine.blocks.release(blocks[::-1])  # a prompt's end is given away first
        is_late = outcome == "accepted" and time.monotonic() > until
        self._engine.counts[f"{Count.EARLY_PULLS} {'late' if is_late else outcome}"] += 1
        over(outcome)

    def wait(self) -> None:
        """Wait a moment for the pulls that run."""
        self._hear_until(time.monotonic() + self._seconds)

    def poll(self) -> None:
        """Hear which pulls have ended."""
        self._hear_until(0.0)

    def _hear_until(self, until: float) -> None:
        while self._running:
            left = max(0.0, until - time.monotonic())
            answer: EarlyAnswer | None = self._inbox.receive(left)
            if answer is None and not left:
                return
            if answer is not None and answer.number in self._running:
                self._go_on(answer.number, answer.outcome)

    def _go_on(self, number: int, outcome: EarlyOutcome) -> None:
        try:
            self._running[number].send(outcome)
        except StopIteration:
            del self._running[number]

    def fail_all(self) -> None:
        """The ranks that were told of pulls have closed: they write no more, and what they have not
        answered by now has failed."""
        self.poll()
        while self._running:
            self._go_on(next(iter(self._running)), "failed")

    def planned(self, request: str) -> None:
        """The engine has taken up a request, or has dropped it."""
        self._unplanned.pop(request, None)

    def reset(self) -> None:
        """What was computed before is not found any more."""
        self._num_resets += 1

    def close(self) -> None:
        self._inbox.close()
