"""Pulls of one rank: rows of another engine on their way into blocks that the engine has given.

A pull is over only when nothing can write to its blocks any more, and failed when the fence or
anything else did not hold: then the engine must not use a single byte of it.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvstow.adapters.vllm.protocol import PullBlocks, held
from kvstow.adapters.vllm.worker.leases import LeasedGenerations
from kvstow.errors import KvstowError, TransferError
from kvstow.memory.arena import Arena
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.pulls import Transfer
from kvstow.transfer.ticket import Ticket

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""A ticket may be shown before the producer's worker has heard of it: ask again so long."""

RETRY_SECONDS = 0.1


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

    @property
    def may_write(self) -> bool:
        """Whether nobody else writes to its blocks."""
        return self.steps is None or self.steps.query()

    def may_retry(self, error: TransferError, now: float) -> bool:
        """Whether the producer may just not have heard of the ticket; a peer that was asked has."""
        is_young = now - self.started < GRACE_SECONDS
        return error.is_early and is_young and self.pull.seconds is None


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
        self.received: set[str] = set()
        """Requests whose pull is over, failed or not."""
        self.failed: set[str] = set()
        self.peers_failed: list[Ticket] = []
        """Tickets of peers that were asked, and whose pull has failed."""

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
        for opened in tuple(self._open.values()):
            self._follow(opened)

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
            g: held(ids, pull.start_token, pull.num_tokens, groups[g].group.block_tokens)
            for g, ids in enumerate(pull.ids)
        }

    def _follow(self, opened: OpenPull) -> None:
        now = time.monotonic()
        transfer = opened.transfer
        if transfer is None:
            if now >= opened.again_at and opened.may_write:
                self._try(opened)
            return
        if not transfer.done or not transfer.wait_quiet(0):
            return
        if transfer.error is None:
            error = self._lacks_tokens(opened.pull)
            self._counts["pulled tokens"] += opened.pull.num_tokens - opened.pull.start_token
            self._note(transfer)
            self._over(opened, error)
        elif opened.may_retry(transfer.error, now):
            opened.transfer, opened.again_at = None, now + RETRY_SECONDS
        else:
            self._over(opened, transfer.error)

    def _lacks_tokens(self, pull: PullBlocks) -> TransferError | None:
        """Why an accepted pull's blocks may not be used, if some of them were not filled.

        A producer with fewer tokens per block may have let go of tokens behind a window of which
        a block here has a part. This request would not miss them; vLLM enters the block into its
        prefix cache as whole, and others would.
        """
        self._agent.settle()
        for group, blocks in self._blocks(pull).items():
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

    def _note(self, transfer: Transfer) -> None:
        stats = transfer.stats
        assert stats is not None
        self._counts["pulled bytes"] += stats.nbytes
        self._counts["descriptors"] += stats.descriptors
        self._counts["pull seconds"] += stats.seconds
        log.info(
            "pulled %d bytes in %d descriptors (%s), %.3f s, fence %s, digest %s",
            stats.nbytes,
            stats.descriptors,
            ", ".join(sorted(set(stats.directions))),
            stats.seconds,
            stats.fence,
            stats.digest,
        )

    def _over(self, opened: OpenPull, error: KvstowError | None) -> None:
        request = opened.pull.request
        del self._open[request]
        self.received.add(request)
        if error is None:
            self._counts["pull accepted"] += 1
            return
        kind = error.kind if isinstance(error, TransferError) else "refused"
        log.warning("request %s: pull failed (%s): %s", request, kind, error)
        self._counts[f"pull {kind}"] += 1
        self.failed.add(request)
        if opened.pull.seconds is not None:
            self.peers_failed += opened.pull.tickets
        for ticket in opened.pull.tickets:  # the engine computes it: nobody will come again
            self._agent.drop(ticket)
