"""The scheduler's side: which request hands over, takes over, is kept or comes back.

Nothing here touches memory. Questions (`matched`) change nothing that a second question could
see; what the workers have to do is collected and taken once per step.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import lcm
from typing import Any

import numpy as np

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    ASKS_FOR_TICKETS,
    BlockIds,
    Handover,
    KeyedBlocks,
    KeysPresent,
    LoadBlocks,
    LookUpKeys,
    OfferBlocks,
    PullBlocks,
    StepOrders,
    StoreBlocks,
    WorkerEndpoint,
    handover_in,
    prompt_digest,
)
from kvstow.blocks.prefix import blocks_seen, served
from kvstow.errors import BlockError, TransferError
from kvstow.plan.group import Group
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.transfer.lease import Leases
from kvstow.transfer.ticket import Ticket


class PinnedBlocks:
    """Generations and leases of every block of every group."""

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self._generations = np.ones((num_groups, num_blocks), np.int64)
        self._leases = np.zeros((num_groups, num_blocks), np.int64)

    def pin(self, blocks: Mapping[int, Blocks]) -> dict[int, Ints]:
        """Note a lease on these blocks; their generations under it."""
        for group, listed in blocks.items():
            self._leases[group][listed.ids] += 1
        return {group: self._generations[group][b.ids].copy() for group, b in blocks.items()}

    def unpin(self, blocks: Mapping[int, Blocks]) -> None:
        """A lease is over; blocks that no other lease keeps begin a new generation."""
        for group, listed in blocks.items():
            if (self._leases[group][listed.ids] < 1).any():
                raise BlockError(
                    f"group {group}: some of blocks {listed.ids[:8].tolist()} are not pinned"
                )
            self._leases[group][listed.ids] -= 1
            over = listed.ids[self._leases[group][listed.ids] == 0]
            self._generations[group][over] += 1

    @property
    def num_pinned(self) -> int:
        return int((self._leases > 0).sum())


KEY_BYTES = 32


def block_keys(tokens: Sequence[int], block_tokens: int, salt: bytes) -> tuple[bytes, ...]:
    """The key of every whole block."""
    data = np.asarray(tokens, "<i8").tobytes()
    size = block_tokens * 8
    key = blake2b(salt, digest_size=KEY_BYTES, key=b"kvstow block").digest()
    keys: list[bytes] = []
    for start in range(0, len(data) - size + 1, size):
        key = blake2b(key + data[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)


class RecallKeys:
    """What is asked, known and planned for requests that may find their beginning again."""

    def __init__(self, groups: Sequence[Group], root: bytes) -> None:
        self._groups = tuple(groups)
        self._root = root
        self._unit = lcm(*(group.block_tokens for group in groups))
        self._asked: dict[str, tuple[tuple[bytes, ...], ...]] = {}
        self._length: dict[str, int] = {}

    # ── coming back ───────────────────────────────────────────────────────────────

    def ask(self, request: str, tokens: Sequence[int], salt: bytes) -> LookUpKeys | None:
        """What to ask the workers for a new request; None where it has no whole block to
        spare (the last token is always computed anew)."""
        limit = (len(tokens) - 1) // self._unit * self._unit
        if limit == 0:
            return None
        keys = self._keys(tokens[:limit], salt)
        self._asked[request] = keys
        return LookUpKeys(request=request, keys=keys)

    def answer(self, found: KeysPresent) -> None:
        """Which rows are there: the longest beginning that every group can serve."""
        keys = self._asked.get(found.request)
        if keys is None:
            return
        lengths = np.arange(0, len(keys[0]) * self._groups[0].block_tokens + 1, self._unit)
        for group, present in zip(self._groups, found.present, strict=True):
            lengths = lengths[served(group, np.asarray(present, np.bool_), lengths)]
        self._length[found.request] = int(lengths.max(initial=0))

    def matched(self, request: str, num_computed: int) -> int | None:
        """Tokens beyond `num_computed` that can be brought back; None while it is not known."""
        if request not in self._asked:
            return 0
        if request not in self._length:
            return None
        return max(0, self._length[request] - num_computed)

    def taken(self, request: str, ids: BlockIds, num_external: int) -> LoadBlocks:
        """The engine has given blocks for `num_external` tokens: what to bring where."""
        keys, length = self._asked[request], self._length[request]
        self.forget(request)
        rows: dict[int, KeyedBlocks] = {}
        for g, group in enumerate(self._groups):
            wanted = blocks_seen(group, length)
            first = (length - num_external) // group.block_tokens
            places = [int(k) for k in wanted if k >= first and ids[g][k] > 0]
            rows[g] = tuple(keys[g][k] for k in places), tuple(ids[g][k] for k in places)
        return LoadBlocks(request=request, rows=rows, num_tokens=num_external)

    def forget(self, request: str) -> None:
        """Whatever was asked for this request is no longer of interest."""
        self._asked.pop(request, None)
        self._length.pop(request, None)

    # ── going out ─────────────────────────────────────────────────────────────────

    def store(
        self, request: str, tokens: Sequence[int], salt: bytes, ids: BlockIds
    ) -> StoreBlocks | None:
        """What to keep of a finished request: its whole blocks, as far as it holds them."""
        rows: dict[int, KeyedBlocks] = {}
        for g, keys in enumerate(self._keys(tokens, salt)):
            places = [k for k, id in enumerate(ids[g][: len(keys)]) if id > 0]
            rows[g] = tuple(keys[k] for k in places), tuple(ids[g][k] for k in places)
        if not any(keys for keys, _ in rows.values()):
            return None
        return StoreBlocks(request=request, rows=rows)

    def _keys(self, tokens: Sequence[int], salt: bytes) -> tuple[tuple[bytes, ...], ...]:
        by_size: Mapping[int, tuple[bytes, ...]] = {
            size: block_keys(tokens, size, self._root + salt)
            for size in {group.block_tokens for group in self._groups}
        }
        return tuple(by_size[group.block_tokens] for group in self._groups)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRequest:
    """A request as the engine knows it: id, prompt, what else its cache depends on."""

    id: str
    tokens: Sequence[int]
    salt: bytes
    params: Mapping[str, Any] | None


class SchedulerSide:
    """Bookkeeping of one engine."""

    def __init__(
        self, groups: Sequence[Group], num_blocks: int, settings: ConnectorOptions, *, model: str
    ) -> None:
        self._groups = tuple(groups)
        self._settings = settings
        self._recall = RecallKeys(groups, model.encode()) if settings.offloads else None
        self._pins = PinnedBlocks(len(groups), num_blocks)
        self._cards: tuple[WorkerEndpoint, ...] = ()
        self._incoming: dict[str, Handover] = {}
        self._loading: set[str] = set()
        """Requests whose blocks are not yet what the engine counts as computed."""
        self._outgoing: dict[str, Mapping[int, Blocks]] = {}
        self._offers: list[OfferBlocks] = []
        self._keeps: list[Ticket] = []
        self._drops: list[Ticket] = []
        self._pulls: list[PullBlocks] = []
        self._lookups: list[LookUpKeys] = []
        self._stores: list[StoreBlocks] = []
        self._restores: list[LoadBlocks] = []
        self.counts: Counter[str] = Counter()

    def meet(self, cards: Sequence[WorkerEndpoint]) -> None:
        """The workers' agents, by rank."""
        self._cards = tuple(cards)

    # ── taking over ───────────────────────────────────────────────────────────────

    def arrived(self, request: EngineRequest) -> None:
        """A request is queued. Bad tickets are counted here and then ignored: the engine
        computes such a request itself."""
        if self._carries(request):
            return
        if self._recall is not None:
            lookup = self._recall.ask(request.id, request.tokens, request.salt)
            self._lookups += [lookup] if lookup else []

    def _carries(self, request: EngineRequest) -> bool:
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

    def found(self, answers: Sequence[KeysPresent]) -> None:
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

    def allocated(self, request: str, ids: BlockIds, num_external: int) -> None:
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
            PullBlocks(
                request=request,
                tickets=handover.tickets,
                ids=ids,
                start_token=handover.num_tokens - num_external,
                num_tokens=handover.num_tokens,
            )
        )

    # ── handing over ──────────────────────────────────────────────────────────────

    def finished(
        self, request: EngineRequest, ids: BlockIds, num_tokens: int
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
        self._offers.append(OfferBlocks(request=request.id, tickets=tickets))
        self.counts["offered"] += 1
        handover = Handover(
            tickets=tickets,
            num_tokens=num_tokens,
            prompt=prompt_digest(request.tokens[:num_tokens], request.salt),
        )
        return True, handover.params()

    def _kept(self, request: EngineRequest, ids: BlockIds, num_tokens: int) -> bool:
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

    def _listed(self, ids: BlockIds, num_tokens: int) -> dict[int, Blocks]:
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

    def take_step(self, *, idle: bool) -> StepOrders:
        """What the workers are to do now; told once."""
        step = StepOrders(
            offers=tuple(self._offers),
            keeps=tuple(self._keeps),
            drops=tuple(self._drops),
            pulls=tuple(self._pulls),
            stores=tuple(self._stores),
            restores=tuple(self._restores),
            lookups=tuple(self._lookups),
            idle=idle,
        )
        for told in (
            self._offers,
            self._keeps,
            self._drops,
            self._pulls,
            self._stores,
            self._restores,
            self._lookups,
        ):
            told.clear()
        return step


def held(ids: Sequence[int], start_token: int, num_tokens: int, block_tokens: int) -> Blocks:
    """The blocks with some of tokens `[start_token, num_tokens)`; id 0 stands for none."""
    array = np.asarray(ids, np.int64)
    index = np.arange(len(array), dtype=np.int64)
    inside = (index >= start_token // block_tokens) & (index * block_tokens < num_tokens)
    which = inside & (array > 0)
    return Blocks(array[which], index[which])
