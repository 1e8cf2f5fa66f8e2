"""Pulls of one rank: rows of another engine on their way into blocks that the engine has given.

A pull has failed when the fence or anything else did not hold: then the engine must not use a
single byte of it. It is over when nothing can write to its blocks any more. A failed one may be
over for its request sooner, while the scheduler's side holds its blocks:

    failed ── quiet soon ─────────────────────────── the request is told, and computed
    failed ── not quiet: blocks held, request told ── quiet: blocks released
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import torch

from kvstow.adapters.vllm.protocol import Hold, PullBlocks, blocks_with_tokens
from kvstow.adapters.vllm.worker.leases import LeasedGenerations
from kvstow.errors import KvstowError, TransferError
from kvstow.memory.arena import Arena
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.pulls import Transfer
from kvstow.transfer.tickets.ticket import Ticket

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""A ticket may be shown before the producer's worker has heard of it: ask again so long."""

RETRY_SECONDS = 0.1

HOLD_SECONDS = 1.0
"""Most failed pulls are quiet at once. A request waits so long for it, then its blocks are held."""


class StepsBegun(Protocol):
    """A point in the device's work: a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has come there."""
        ...


@dataclass(slots=True, eq=False)
class OpenPull:
    """A pull under way. A transfer that has failed may still be written to for a while. `steps`
    may write to its blocks, too: nothing is pulled before they are over."""

    pull: PullBlocks
    started: float
    steps: StepsBegun | None = None
    transfer: Transfer | None = None
    again_at: float = 0.0
    failed_at: float | None = None

    @property
    def may_write(self) -> bool:
        """Whether nobody else writes to its blocks."""
        return self.steps is None or self.steps.query()

    def comes_to_rest(self) -> bool:
        """Whether nothing writes for its transfer any more; if so, its rows are given back."""
        return self.transfer is not None and self.transfer.wait_quiet(0)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks of all groups that its transfer writes to."""
        assert self.transfer is not None
        into = self.transfer.order.into.values()
        return tuple(sorted({int(id) for blocks in into for id in blocks.ids}))

    def may_retry(self, error: TransferError, now: float) -> bool:
        """Whether the producer may just not have heard of the ticket; a peer that was asked has."""
        is_young = now - self.started < GRACE_SECONDS
        return error.is_early and is_young and self.pull.seconds is None


@dataclass(slots=True, eq=False)
class EndedPulls:
    """What has become of pulls since it was last told."""

    received: set[str] = field(default_factory=set[str])
    """Requests whose pull is over, failed or not."""
    failed: set[str] = field(default_factory=set[str])
    peers_failed: list[Ticket] = field(default_factory=list[Ticket])
    """Tickets of peers that were asked, and whose pull has failed."""
    held: dict[Hold, tuple[int, ...]] = field(default_factory=dict[Hold, tuple[int, ...]])
    """Blocks that somebody may still write to."""
    released: list[Hold] = field(default_factory=list[Hold])


class RankPulls:
    """Pulls that the scheduler's side has ordered of this rank.

    `counts` is told what they have brought and how they end. `wake` is called, in the agent's
    thread, when one may be over. With `after_steps`, steps that the engine has begun may still
    write to a pull's blocks: they are waited for.
    """

    def __init__(
        self,
        agent: Agent,
        arena: Arena,
        blocks: LeasedGenerations,
        counts: defaultdict[str, float],
        *,
        wake: Callable[[], None],
        after_steps: bool,
    ) -> None:
        self.arena = arena
        self._agent = agent
        self._filled = blocks
        self._counts = counts
        self._wake = wake
        self._after_steps = after_steps
        self._open: dict[str, OpenPull] = {}
        self._unquiet: dict[Hold, OpenPull] = {}
        """Failed pulls whose requests have been told."""
        self._numbers = count(1)
        self._ended = EndedPulls()

    def __len__(self) -> int:
        """Pulls that are not over."""
        return len(self._open)

    def begin(self, pull: PullBlocks) -> None:
        """Pull, as soon as nobody else writes to the blocks."""
        opened = OpenPull(pull, time.monotonic(), self._steps_begun())
        self._open[pull.request] = opened
        if opened.may_write:
            self._try(opened)

    def follow(self) -> None:
        """Look what has become of the pulls."""
        for hold, opened in tuple(self._unquiet.items()):
            if opened.comes_to_rest():
                self._release(hold)
        for opened in tuple(self._open.values()):
            self._follow(opened)

    def take(self) -> EndedPulls:
        """What has become of them; told once."""
        ended, self._ended = self._ended, EndedPulls()
        return ended

    def _steps_begun(self) -> StepsBegun | None:
        """The end of what the engine has given the device by now, where that counts."""
        if not self._after_steps or self.arena.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.arena.device))
        return event

    def _try(self, opened: OpenPull) -> None:
        pull = opened.pull
        try:
            opened.transfer = self._agent.pull(
                pull.tickets,
                into=self._blocks(pull),
                start_token=pull.start_token,
                num_tokens=pull.num_tokens,
                deadline=pull.seconds,
                on_quiet=self._wake,
            )
        except KvstowError as error:
            self._over(opened, error)

    def _blocks(self, pull: PullBlocks) -> dict[int, Blocks]:
        groups = self.arena.layout.groups
        return {
            g: blocks_with_tokens(
                ids, pull.start_token, pull.num_tokens, groups[g].group.block_tokens
            )
            for g, ids in enumerate(pull.ids)
        }

    def _follow(self, opened: OpenPull) -> None:
        now = time.monotonic()
        transfer = opened.transfer
        if transfer is None:
            if now >= opened.again_at and opened.may_write:
                self._try(opened)
            return
        if not transfer.done:
            return
        if not opened.comes_to_rest():
            self._wait_or_hold(opened, transfer.error, now)
            return
        if transfer.error is None:
            error = self._lacks_tokens(opened.pull, transfer.order.into)
            if error is None:
                self._note(opened.pull, transfer)
            self._over(opened, error)
        elif opened.may_retry(transfer.error, now):
            opened.transfer, opened.failed_at = None, None
            opened.again_at = now + RETRY_SECONDS
        else:
            self._over(opened, transfer.error)

    def _lacks_tokens(self, pull: PullBlocks, into: Mapping[int, Blocks]) -> TransferError | None:
        """Why an accepted pull's blocks may not be used, if some of them were not filled.

        A producer with fewer tokens per block may have let go of tokens behind a window of which
        a block here has a part. This request would not miss them; vLLM enters the block into its
        prefix cache as whole, and others would.
        """
        self._agent.settle()
        for group, blocks in into.items():
            lacking = self._filled.unfilled(group, blocks.ids)
            if len(lacking):
                placed = self.arena.layout.groups[group].group
                return TransferError(
                    f"group {placed.name!r}: {len(lacking)} of {len(blocks)} blocks of "
                    f"{placed.block_tokens} tokens lack some that {pull.tickets[0].agent!r} no "
                    "longer keeps\n\nhint: --block-size of prefill should be a multiple of "
                    "decode's",
                    kind="refused",
                )
        return None

    def _note(self, pull: PullBlocks, transfer: Transfer) -> None:
        stats = transfer.stats
        assert stats is not None
        self._counts["pulled tokens"] += pull.num_tokens - pull.start_token
        self._counts["pulled bytes"] += stats.nbytes
        self._counts["descriptors"] += stats.descriptors
        self._counts["pull seconds"] += stats.seconds
        log.debug(
            "pulled %d bytes in %d descriptors (%s), %.3f s, fence %s, digest %s",
            stats.nbytes,
            stats.descriptors,
            ", ".join(sorted(set(stats.directions))),
            stats.seconds,
            stats.fence,
            stats.digest,
        )

    def _wait_or_hold(self, opened: OpenPull, error: TransferError | None, now: float) -> None:
        """A transfer has ended, and is not at rest. One that may be tried again is waited for."""
        if error is None:
            return
        if opened.failed_at is None:
            opened.failed_at = now
        has_waited = now - opened.failed_at >= HOLD_SECONDS
        if opened.pull.may_hold and has_waited and not opened.may_retry(error, now):
            self._hold(opened, error)

    def _hold(self, opened: OpenPull, error: TransferError) -> None:
        """The engine computes the request, elsewhere; nobody is given its blocks for now."""
        hold = self._agent.name, next(self._numbers)
        self._unquiet[hold] = opened
        self._ended.held[hold] = opened.blocks
        log.warning(
            "request %s: peer %r may still write to %d blocks: the request is told, and the blocks "
            "are held until the peer has stopped, or has died",
            opened.pull.request,
            error.peer,
            len(opened.blocks),
        )
        self._over(opened, error)

    def _release(self, hold: Hold) -> None:
        opened = self._unquiet.pop(hold)
        self._ended.released.append(hold)
        log.info(
            "request %s: nobody writes to its %d blocks any more: they are released",
            opened.pull.request,
            len(opened.blocks),
        )

    def _over(self, opened: OpenPull, error: KvstowError | None) -> None:
        request = opened.pull.request
        del self._open[request]
        self._ended.received.add(request)
        if error is None:
            self._counts["pull accepted"] += 1
            return
        kind = error.kind if isinstance(error, TransferError) else "refused"
        log.warning("request %s: pull failed (%s): %s", request, kind, error)
        self._counts[f"pull {kind}"] += 1
        self._ended.failed.add(request)
        if opened.pull.seconds is not None:
            self._ended.peers_failed += opened.pull.tickets
        for ticket in opened.pull.tickets:  # the engine computes it: nobody will come again
            self._agent.drop(ticket)
