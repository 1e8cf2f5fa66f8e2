"""Who hands out rows in a node: kvstow's own ledger, or an engine that keeps its own ids."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.table import RowCopy
from kvstow.errors import OutOfBlocks
from kvstow.plan.layout import Layout
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks
from kvstow.transfer.tickets.owner import Generations
from schedules.truth import Ints, Request


@dataclass(eq=False)
class Claim:
    """Rows of one request: all of them, and those whose content is not there yet."""

    request: Request
    blocks: dict[int, Blocks]
    new: dict[int, Blocks]
    hit_tokens: int
    handle: Any


class LedgerRows:
    """Requests on a ledger: what was computed stays cached when its request ends.

    `copy` makes the copies that the ledger wants.
    """

    def __init__(self, layout: Layout) -> None:
        self.owner = self.pool = Pool(layout)
        self.ledger = Ledger(self.pool)
        self.copy: Callable[[Iterable[RowCopy]], None] = lambda copies: None
        self._layout = layout

    def claim(self, request: Request, num_tokens: int | None = None) -> Claim:
        """Rows for a request, or for so many of its tokens; OutOfBlocks if there are too few."""
        admitted = self.ledger.admit(request.prompt, num_tokens=num_tokens)
        self.copy(admitted.copies)
        return self._claimed(request, admitted.request, admitted.hit_tokens)

    def _claimed(self, request: Request, handle: int, hit_tokens: int) -> Claim:
        blocks = self.ledger.blocks(handle)
        new: dict[int, Blocks] = {}
        for g, listed in blocks.items():
            group = self._layout.groups[g].group
            is_state = isinstance(group.retention, State)  # the running row is nobody else's
            first = 0 if is_state else hit_tokens // group.block_tokens
            at = int(np.searchsorted(listed.index, first))
            new[g] = Blocks(listed.ids[at:], listed.index[at:])
        return Claim(request, blocks, new, hit_tokens, handle)

    def finish(self, claim: Claim) -> Claim:
        """Rows for all tokens of a request that has some; OutOfBlocks if there are too few."""
        self.copy(self.ledger.grow(claim.handle, len(claim.request.tokens)))
        return self._claimed(claim.request, claim.handle, claim.hit_tokens)

    def fork(self, claim: Claim, longer: Request) -> Claim:
        """The request once more, which goes on with one token; OutOfBlocks if there are too few
        rows."""
        twin = self.ledger.fork(claim.handle)
        self.copy(twin.copies)
        try:
            self.ledger.append(twin.request, longer.tokens[-1:])
            self.copy(self.ledger.grow(twin.request, len(longer.tokens)))
        except OutOfBlocks:
            self.ledger.release(twin.request, computed_tokens=claim.hit_tokens)
            raise
        return self._claimed(longer, twin.request, len(longer.tokens) - 1)

    def blocks(self, claim: Claim) -> dict[int, Blocks]:
        """What the request holds now, and which blocks of it are partial."""
        return self.ledger.blocks(claim.handle)

    def computed(self, claim: Claim) -> None:
        """All tokens of the request are there, and can be found; windows move on."""
        self.ledger.grow(claim.handle, len(claim.request.tokens))
        claim.blocks = self.ledger.blocks(claim.handle)

    def received(self, claim: Claim) -> None:
        """All tokens of the request were brought, as far as the next one sees them."""
        self.ledger.received(claim.handle)
        claim.blocks = self.ledger.blocks(claim.handle)

    def release(self, claim: Claim) -> None:
        """The request ends, and all of it may be found again."""
        self.ledger.release(claim.handle)

    def drop(self, claim: Claim) -> None:
        """The request ends, and nothing of it was brought or computed."""
        self.ledger.release(claim.handle, computed_tokens=claim.hit_tokens)

    def left(self) -> dict[str, int]:
        """What must be nothing when every request has ended."""
        groups = range(len(self.ledger.groups))
        return {
            "rows held": sum(self.pool.num_held(g) for g in groups),
            "rows in quarantine": sum(len(self.pool.quarantined(g)) for g in groups),
        }

    def check(self) -> None:
        self.ledger.check()


class EngineRows:
    """An engine with ids of its own: it uses a row again when no agent keeps it any more."""

    def __init__(self, layout: Layout) -> None:
        self.owner = Generations(layout)
        groups = range(len(layout.groups))
        self._steps = [rows.group.block_tokens for rows in layout.groups]
        self._least = [rows.rows_per_slab for rows in layout.groups]
        self._used: list[set[int]] = [set() for _ in groups]
        self._counts = [layout.num_blocks(g) for g in groups]

    def claim(self, request: Request) -> Claim:
        needs = [-(-len(request.tokens) // step) for step in self._steps]
        ids = {g: self._free(g)[:count] for g, count in enumerate(needs)}
        for g, count in enumerate(needs):
            if len(ids[g]) < count:
                raise OutOfBlocks("no rows", needed=count, free=len(ids[g]))
            self._used[g].update(ids[g].tolist())
        blocks = {g: Blocks.first(found) for g, found in ids.items()}
        return Claim(request, blocks, blocks, 0, None)

    def _free(self, group: int) -> Ints:
        every = np.arange(self._least[group], self._counts[group])
        idle = self.owner.holds(group, every) == 0
        return np.array([i for i in every[idle].tolist() if i not in self._used[group]], np.int64)

    def blocks(self, claim: Claim) -> dict[int, Blocks]:
        return claim.blocks

    def computed(self, claim: Claim) -> None:
        """Nothing changes."""

    def received(self, claim: Claim) -> None:
        """An engine's rows stay as they are: nothing is found in them again."""

    def release(self, claim: Claim) -> None:
        for g, blocks in claim.blocks.items():
            self._used[g].difference_update(blocks.ids.tolist())
            nobodys = self.owner.holds(g, blocks.ids) == 0  # the agent retires what it keeps
            self.owner.retire(g, blocks.ids[nobodys])

    drop = release

    def left(self) -> dict[str, int]:
        kept = sum(int(self.owner.holds(g, np.arange(n)).sum()) for g, n in enumerate(self._counts))
        return {"rows held": sum(map(len, self._used)), "rows kept": kept}

    def check(self) -> None:
        """Nothing to check: a set cannot contradict itself."""
