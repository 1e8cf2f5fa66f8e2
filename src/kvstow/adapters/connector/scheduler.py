"""The scheduler's side: which request hands over, takes over, is kept or comes back.

Nothing here touches memory. Questions (`matched`) change nothing that a second question could
see; what the workers have to do is collected and taken once per step.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstow.adapters.connector.handover import (
    ASKS_FOR_TICKETS,
    Handover,
    handover_in,
    prompt_digest,
)
from kvstow.adapters.connector.messages import (
    Card,
    Found,
    Ids,
    Lookup,
    Offer,
    Pull,
    Restore,
    Step,
    Store,
)
from kvstow.adapters.connector.pins import Pins
from kvstow.adapters.connector.recall import Recall
from kvstow.adapters.connector.settings import Settings
from kvstow.errors import TransferError
from kvstow.plan.group import Group
from kvstow.route.blocks import Blocks
from kvstow.transfer.lease import Leases
from kvstow.transfer.ticket import Ticket

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """A request as the engine knows it: id, prompt, what else its cache depends on."""

    id: str
    tokens: Sequence[int]
    salt: bytes
    params: Mapping[str, Any] | None


class SchedulerSide:
    """Bookkeeping of one engine."""

    def __init__(
        self, groups: Sequence[Group], num_blocks: int, settings: Settings, *, model: str
    ) -> None:
        self._groups = tuple(groups)
        self._settings = settings
        self._recall = Recall(groups, model.encode()) if settings.offloads else None
        self._pins = Pins(len(groups), num_blocks)
        self._cards: tuple[Card, ...] = ()
        self._incoming: dict[str, Handover] = {}
        self._loading: set[str] = set()
        """Requests whose blocks are not yet what the engine counts as computed."""
        self._outgoing: dict[str, Mapping[int, Blocks]] = {}
        self._offers: list[Offer] = []
        self._keeps: list[Ticket] = []
        self._drops: list[Ticket] = []
        self._pulls: list[Pull] = []
        self._lookups: list[Lookup] = []
        self._stores: list[Store] = []
        self._restores: list[Restore] = []
        self.counts: Counter[str] = Counter()

    def meet(self, cards: Sequence[Card]) -> None:
        """The workers' agents, by rank."""
        self._cards = tuple(cards)

    # ── taking over ───────────────────────────────────────────────────────────────

    def arrived(self, request: Asked) -> None:
        """A request is queued. Bad tickets are counted here and then ignored: the engine
        computes such a request itself."""
        if self._carries(request):
            return
        if self._recall is not None:
            lookup = self._recall.ask(request.id, request.tokens, request.salt)
            self._lookups += [lookup] if lookup else []

    def _carries(self, request: Asked) -> bool:
        """Whether the request came with tickets that may be used; they are kept alive then."""
        try:
            handover = handover_in(request.params)
            if handover is None:
                return False
            handover.check(request.tokens, request.salt)
        except TransferError as error:
            log.warning("request %s: %s", request.id, error)
            self.counts["refused"] += 1
            return False
        self._incoming[request.id] = handover
        self._keeps += handover.tickets
        return True

    def found(self, answers: Sequence[Found]) -> None:
        """The workers' answers to what was looked up."""
        for answer in answers:
            if self._recall is not None:
                self._recall.answer(answer)

    def matched(self, request: str, num_computed: int) -> int | None:
        """How many tokens beyond `num_computed` could be loaded; None: ask again later."""
        handover = self._incoming.get(request)
        if handover is not None:
            return max(0, handover.num_tokens - num_computed)
        return self._recall.matched(request, num_computed) if self._recall else 0

    def allocated(self, request: str, ids: Ids, num_external: int) -> None:
        """The engine has given the request blocks, for `num_external` tokens to be loaded.

        With none to be loaded it goes on to compute, after a load too, failed or not.
        """
        if num_external == 0:
            self._loading.discard(request)
            self._forget(request)
            return
        self._loading.add(request)
        handover = self._incoming.pop(request, None)
        if handover is None:
            assert self._recall is not None
            self._restores.append(self._recall.taken(request, ids, num_external))
            return
        self._pulls.append(
            Pull(
                request=request,
                tickets=handover.tickets,
                ids=ids,
                start_token=handover.num_tokens - num_external,
                num_tokens=handover.num_tokens,
            )
        )

    # ── handing over ──────────────────────────────────────────────────────────────

    def finished(
        self, request: Asked, ids: Ids, num_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over, with the cache of its first `num_tokens` tokens in these blocks.

        Whether its blocks must stay, and what its answer carries. One that ends while it is
        being loaded has nothing to give.
        """
        self._forget(request.id)
        if request.id in self._loading:
            self._loading.discard(request.id)
            return False, None
        stays = self._kept(request, ids, num_tokens)
        asks = bool(request.params and request.params.get(ASKS_FOR_TICKETS))
        if not asks or num_tokens < 1:
            return stays, None
        blocks = self._listed(ids, num_tokens)
        tickets = self._tickets(blocks, num_tokens)
        self._outgoing[request.id] = blocks
        self._offers.append(Offer(request=request.id, tickets=tickets))
        self.counts["offered"] += 1
        handover = Handover(
            tickets=tickets,
            num_tokens=num_tokens,
            prompt=prompt_digest(request.tokens[:num_tokens], request.salt),
        )
        return True, handover.params()

    def _kept(self, request: Asked, ids: Ids, num_tokens: int) -> bool:
        """Whether some of the request goes to the tiers."""
        if self._recall is None:
            return False
        order = self._recall.store(request.id, request.tokens[:num_tokens], request.salt, ids)
        self._stores += [order] if order else []
        return order is not None

    def sent(self, request: str) -> None:
        """The workers' leases of a request are over: the engine may reuse its blocks."""
        blocks = self._outgoing.pop(request, None)
        if blocks is not None:
            self._pins.unpin(blocks)

    def _forget(self, request: str) -> None:
        handover = self._incoming.pop(request, None)
        if handover is not None:
            self._drops += handover.tickets
        if self._recall is not None:
            self._recall.forget(request)

    def _listed(self, ids: Ids, num_tokens: int) -> dict[int, Blocks]:
        """What the groups hold of the first tokens; blocks beyond and absent ones left out."""
        return {
            g: held(group_ids, 0, num_tokens, self._groups[g].block_tokens)
            for g, group_ids in enumerate(ids)
        }

    def _tickets(self, blocks: Mapping[int, Blocks], num_tokens: int) -> tuple[Ticket, ...]:
        if not self._cards:
            raise TransferError("no worker has told its address yet", kind="refused")
        generations = self._pins.pin(blocks)
        return tuple(
            Ticket(
                agent=card.agent,
                start=card.start,
                address=card.address,
                key=card.key,
                lease=Leases.fresh_id(),
                lease_seconds=self._settings.lease_seconds,
                fingerprint=card.fingerprint,
                num_tokens=num_tokens,
                blocks=blocks,
                generations=generations,
            )
            for card in self._cards
        )

    # ── steps ─────────────────────────────────────────────────────────────────────

    def take_step(self, *, idle: bool) -> Step:
        """What the workers are to do now; told once."""
        step = Step(
            offers=tuple(self._offers),
            keeps=tuple(self._keeps),
            drops=tuple(self._drops),
            pulls=tuple(self._pulls),
            stores=tuple(self._stores),
            restores=tuple(self._restores),
            lookups=tuple(self._lookups),
            idle=idle,
        )
        for told in (self._offers, self._keeps, self._drops, self._pulls, self._stores,
                     self._restores, self._lookups):  # fmt: skip
            told.clear()
        return step


def held(ids: Sequence[int], start_token: int, num_tokens: int, block_tokens: int) -> Blocks:
    """The blocks with some of tokens `[start_token, num_tokens)`; id 0 stands for none."""
    array = np.asarray(ids, np.int64)
    index = np.arange(len(array), dtype=np.int64)
    inside = (index >= start_token // block_tokens) & (index * block_tokens < num_tokens)
    which = inside & (array > 0)
    return Blocks(array[which], index[which])
