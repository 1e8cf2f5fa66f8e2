"""Pulls of one rank: rows of another engine on their way into blocks that the engine has given.

A pull has failed when the fence or anything else did not hold: then the engine must not use a
single byte of it. It is over when nothing can write to its blocks any more. A failed one may be
over for its request sooner, while the scheduler's side holds its blocks:

    failed ── quiet soon ─────────────────────────── the request is told, and computed
    failed ── not quiet: blocks held, request told ── quiet: blocks released
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count

import torch

from kvstow.adapters.vllm.counts import Count
from kvstow.adapters.vllm.protocol import (
    EarlyAnswer,
    EarlyOutcome,
    EarlyPull,
    PullBlocks,
    StepOrders,
    StepResults,
    blocks_with_tokens,
)
from kvstow.adapters.vllm.worker.offers import LeasedGenerations
from kvstow.adapters.vllm.worker.part import RankPart, RankState, Task, Tasks
from kvstow.errors import KvstowError, TransferError
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.pulls import Transfer

log = logging.getLogger(__name__)

HOLD_SECONDS = 1.0
"""Most failed pulls are quiet at once. A request waits so long for it, then its blocks are held."""


class RankPulls(RankPart):
    """Pulls that the scheduler's side has ordered of this rank."""

    def __init__(self, rank: RankState, agent: Agent, blocks: LeasedGenerations) -> None:
        self._rank, self._counts = rank, rank.counts
        self._agent = agent
        self._filled = blocks
        self._tasks = Tasks()
        self._holds = Tasks()
        """Failed pulls whose requests have been told."""
        self._numbers = count(1)
        self._results = StepResults()
        """What was not told yet."""
        self._broken_peers: set[str] = set()

    def __len__(self) -> int:
        """Pulls that are not over."""
        return len(self._tasks)

    # ── what the rank does in a step ──────────────────────────────────────────────

    def begin(self, step: StepOrders) -> None:
        """Tickets are kept alive that somebody will pull, and given back if nobody will."""
        pulled = {ticket.lease for pull in step.pulls for ticket in pull.tickets}
        with suppress(TransferError):  # its thread has ended: leases run out, and pulls fail
            for ticket in step.keeps:
                if ticket.lease not in pulled:  # a pull keeps its lease alive itself
                    self._agent.keep(ticket)
            for ticket in step.drops:
                self._agent.drop(ticket)

    def load(self, step: StepOrders) -> None:
        for pull in step.pulls:
            self._tasks.begin(self._run(pull, partial(self._report, pull.request)))

    def hear(self, early: EarlyPull) -> None:
        """Pull at once, between two steps, and answer when that is over."""

        def answer(outcome: EarlyOutcome) -> Task:
            while not early.answer_to.send(EarlyAnswer(early.number, outcome)):
                yield  # its inbox is full

        is_mapped = all(self._agent.maps(ticket) for ticket in early.pull.tickets)
        self._tasks.begin(self._run(early.pull, answer) if is_mapped else answer("declined"))

    def report(self, results: StepResults) -> None:
        """What has become of the pulls since the last time."""
        self.resume()
        results.join(self._results)
        self._results = StepResults()

    def broken_peers(self) -> set[str]:
        """Addresses of peers that were asked, and whose pull has failed; told once."""
        broken, self._broken_peers = self._broken_peers, set()
        return broken

    def close(self) -> None:
        """End all pulls and leases."""
        self._agent.close()
        closed = TransferError(f"agent {self._agent.name!r} is closed", kind="aborted")
        self.resume()
        self._tasks.end(closed)

    def resume(self) -> None:
        """Go on with all pulls, as far as they can."""
        self._tasks.resume()
        self._holds.resume()

    # ── one pull ──────────────────────────────────────────────────────────────────

    def _report(self, request: str, outcome: EarlyOutcome) -> Task:
        self._results.received.add(request)
        if outcome == "failed":
            self._results.failed.add(request)
        yield from ()

    def _run(self, pull: PullBlocks, report: Callable[[EarlyOutcome], Task]) -> Task:
        """A pull from its order to its end."""
        outcome: EarlyOutcome = "failed"
        try:
            yield from self._until_steps_are_over()
            transfer = self._begin(pull)
            while not transfer.done:
                yield
            yield from self._until_quiet_or_held(pull, transfer)
            if transfer.error is not None:
                raise transfer.error
            self._check_whole(pull, transfer.order.into)
            self._accept(pull, transfer)
            outcome = "accepted"
        except Exception as error:  # whoever waits for it is told in any case
            self._fail(pull, error)
        yield from report(outcome)

    def _until_steps_are_over(self) -> Task:
        """What the engine has given the device by now may write to the blocks, too."""
        if self._rank.after_steps and self._rank.arena.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._rank.arena.device))
            while not event.query():
                yield

    def _begin(self, pull: PullBlocks) -> Transfer:
        groups = self._rank.arena.layout.groups
        into: dict[int, Blocks] = {
            g: blocks_with_tokens(
                ids, pull.start_token, pull.num_tokens, groups[g].group.block_tokens
            )
            for g, ids in enumerate(pull.ids)
        }
        return self._agent.pull(
            pull.tickets,
            into=into,
            start_token=pull.start_token,
            num_tokens=pull.num_tokens,
            deadline=pull.seconds,
            # the scheduler's side has compared it
            identity=pull.tickets[0].identity if pull.tickets else None,
            on_quiet=self._rank.wake,
        )

    def _until_quiet_or_held(self, pull: PullBlocks, transfer: Transfer) -> Task:
        """Until nothing writes to the blocks, or it has failed and the engine keeps them for now:
        it computes the request in others."""
        until = time.monotonic() + HOLD_SECONDS
        while not transfer.wait_quiet(0):
            if transfer.error is not None and pull.may_hold and time.monotonic() >= until:
                self._holds.begin(self._hold(pull, transfer, transfer.error))
                return
            yield

    def _hold(self, pull: PullBlocks, transfer: Transfer, error: TransferError) -> Task:
        """Have a failed pull's blocks held until nobody writes to them any more."""
        hold = self._agent.name, next(self._numbers)
        blocks = {int(id) for each in transfer.order.into.values() for id in each.ids}
        self._results.held[hold] = tuple(sorted(blocks))
        log.warning(
            "request %s: peer %r may still write to %d blocks: the request is told, and the blocks "
            "are held (failed pull %d) until the peer has stopped, or has died",
            pull.request,
            error.peer,
            len(blocks),
            hold[1],
        )
        while not transfer.wait_quiet(0):
            yield
        self._results.released.append(hold)
        log.info("blocks of failed pull %d of %s are released", hold[1], hold[0])

    def _check_whole(self, pull: PullBlocks, into: Mapping[int, Blocks]) -> None:
        """TransferError if some blocks of an accepted pull were not filled.

        A producer with fewer tokens per block may have let go of tokens behind a window of which
        a block here has a part. This request would not miss them; vLLM enters the block into its
        prefix cache as whole, and others would.
        """
        self._agent.settle()
        for group, blocks in into.items():
            lacking = self._filled.unfilled(group, blocks.ids)
            if len(lacking):
                placed = self._rank.arena.layout.groups[group].group
                raise TransferError(
                    f"group {placed.name!r}: {len(lacking)} of {len(blocks)} blocks of "
                    f"{placed.block_tokens} tokens lack some that {pull.tickets[0].agent!r} no "
                    "longer keeps\n\nhint: --block-size of prefill should be a multiple of "
                    "decode's",
                    kind="refused",
                )

    def _accept(self, pull: PullBlocks, transfer: Transfer) -> None:
        stats = transfer.stats
        assert stats is not None
        self._counts[f"{Count.PULLS} accepted"] += 1
        self._counts[Count.PULLED_TOKENS] += pull.num_tokens - pull.start_token
        self._counts[Count.PULLED_BYTES] += stats.nbytes
        self._counts[Count.PULL_DESCRIPTORS] += stats.descriptors
        self._counts.seconds[Count.PULL_SECONDS].append(stats.seconds)
        for ticket, way in zip(pull.tickets, stats.directions, strict=True):
            reason = self._agent.peers.at(ticket.address, ticket.key).unmapped or "option"
            self._counts[f"{Count.PULL_PATHS} {'mapped' if way == 'mapped' else reason}"] += 1
        log.debug(
            "pulled %d bytes in %d descriptors (%s), %.3f s, fence %s, digest %s",
            stats.nbytes,
            stats.descriptors,
            ", ".join(sorted(set(stats.directions))),
            stats.seconds,
            stats.fence,
            stats.digest,
        )

    def _fail(self, pull: PullBlocks, error: Exception) -> None:
        """The engine computes the request: nobody will come for its tickets again."""
        kind = error.kind if isinstance(error, TransferError) else "refused"
        if not isinstance(error, KvstowError):
            log.error("a pull ended by a bug", exc_info=error)
        log.warning("request %s: pull failed (%s): %s", pull.request, kind, error)
        self._counts[f"{Count.PULLS} {kind}"] += 1
        for ticket in pull.tickets:
            with suppress(TransferError):  # closed
                self._agent.drop(ticket)
            if pull.seconds is not None:
                self._broken_peers.add(ticket.address)
