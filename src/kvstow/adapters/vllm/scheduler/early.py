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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from kvstow.adapters.vllm.counts import EARLY_PULLS
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


@dataclass(slots=True, eq=False)
class Running:
    """A pull that ranks have been told of. `cached` of its blocks hold the prompt's beginning."""

    request: Request
    blocks: Sequence[int]
    cached: int
    ranks_left: int
    outcome: EarlyOutcome = "accepted"
    is_late: bool = False
    is_void: bool = False
    """What was computed before is not to be found any more."""


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
        self._running: dict[int, Running] = {}
        self._unplanned: dict[str, int] = {}
        """By request that the engine has not planned yet, blocks that wait for it."""

    def __len__(self) -> int:
        """Pulls that are not over."""
        return len(self._running)

    def begin(self, request: Request, handover: Handover) -> Begin:
        """Have every rank pull the whole blocks of a hand-over, but those that are here."""
        size, pool = self._block_tokens, self._engine.pool
        total = min(handover.num_tokens, len(request.all_token_ids) - 1) // size
        if not self._seconds or pool is None or not self._may_be_found(request, total):
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
        told = [worker.inbox.send(order) for worker in self._engine.workers]
        if not any(told):
            pool.release(blocks)
            return "beside steps"
        running = Running(request, blocks, len(cached), ranks_left=sum(told))
        running.outcome = "accepted" if all(told) else "failed"
        self._running[order.number] = running
        self._unplanned[request.request_id] = needed
        return "begun"

    def _may_be_found(self, request: Request, num_blocks: int) -> bool:
        """Whether the engine looks for so many blocks of a request in its cache."""
        return len(request.block_hashes) >= num_blocks and not request.skip_reading_prefix_cache

    def wait(self) -> dict[str, EarlyOutcome]:
        """Wait a moment for the pulls that run; those that have ended, by request."""
        until = time.monotonic() + self._seconds
        ended: dict[str, EarlyOutcome] = {}
        while self._running and (left := until - time.monotonic()) > 0:
            ended |= self._hear(self._inbox.receive(left))
        for running in self._running.values():
            running.is_late = True
        return ended

    def poll(self) -> dict[str, EarlyOutcome]:
        """Pulls that have ended since the last time, by request."""
        ended: dict[str, EarlyOutcome] = {}
        while self._running and (answer := self._inbox.receive(0)) is not None:
            ended |= self._hear(answer)
        return ended

    def _hear(self, answer: EarlyAnswer | None) -> dict[str, EarlyOutcome]:
        """A rank has answered; what has ended by it."""
        running = self._running.get(answer.number) if answer is not None else None
        if answer is None or running is None:
            return {}
        running.ranks_left -= 1
        if running.outcome != answer.outcome:  # the same from all, or it has failed
            is_first = running.ranks_left + 1 == len(self._engine.workers)
            running.outcome = answer.outcome if is_first else "failed"
        if running.ranks_left:
            return {}
        del self._running[answer.number]
        self._end(running)
        return {running.request.request_id: running.outcome}

    def _end(self, running: Running) -> None:
        """Nothing writes to the blocks any more: they are the engine's, with what they hold."""
        if running.outcome == "accepted" and not running.is_void:
            self._engine.blocks.enter(
                running.request, running.blocks, running.cached, self._block_tokens
            )
        self._engine.blocks.release(running.blocks[::-1])  # a prompt's end is given away first
        if running.outcome != "accepted":
            self._unplanned.pop(running.request.request_id, None)
        is_late = running.outcome == "accepted" and running.is_late
        self._engine.counts[f"{EARLY_PULLS} {'late' if is_late else running.outcome}"] += 1

    def planned(self, request: str) -> None:
        """The engine has taken up a request, or has dropped it."""
        self._unplanned.pop(request, None)

    def reset(self) -> None:
        """Nothing of before is found any more."""
        for running in self._running.values():
            running.is_void = True

    def close(self) -> None:
        self._inbox.close()
