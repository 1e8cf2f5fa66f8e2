"""Which requests ask peers, in the scheduler."""

from collections.abc import Sequence
from math import gcd, lcm

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    AskPeers,
    BlockIds,
    EngineRequest,
    Handover,
    StepResults,
)
from kvstow.adapters.vllm.scheduler.handovers import Handovers
from kvstow.adapters.vllm.scheduler.key_index import RequestKeys
from kvstow.adapters.vllm.scheduler.source import OrderBook, PrefixSource
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity
from kvstow.transfer.channel.messages import MAX_ASKED_KEYS


class PeerQuestions(PrefixSource):
    """Which requests ask peers; each does so once. Holds no memory and waits for nothing."""

    def __init__(
        self,
        groups: Sequence[Group],
        options: ConnectorOptions,
        book: OrderBook,
        handovers: Handovers,
        *,
        ahead: int = 0,
    ) -> None:
        self._book, self._handovers = book, handovers
        sizes = [group.block_tokens for group in groups]
        self.step, self._unit = gcd(*sizes), lcm(*sizes)
        """Tokens from one key of a question to the next."""
        self._least = options.peers_tokens
        self._has_peers = bool(options.peers)
        self._left = max(1, ahead)
        self._requests: dict[str, tuple[EngineRequest, RequestKeys]] = {}
        self._waiting: dict[str, int] = {}
        """Tokens that were held when peers were asked."""

    def arrived(self, request: EngineRequest, keys: RequestKeys, *, has_tickets: bool) -> None:
        if request.shareable and not has_tickets:
            self._requests[request.id] = request, keys

    def reach(self, id: str, num_computed: int, num_held: int) -> int | None:
        """What the other sources have, or None while peers are asked for what is missing."""
        return None if self._waits(id, num_held) else num_held

    def _waits(self, id: str, num_held: int) -> bool:
        if id in self._waiting:
            return True
        if id not in self._requests:
            return False
        request, keys = self._requests.pop(id)
        limits = request.load_limits
        most = limits.up_to(len(request.tokens) - self._left, num_held)
        limit = most // self._unit * self._unit
        has_peer = limits.allows("cpu", "remote") and (self._has_peers or limits.peer)
        if not has_peer or limit - num_held < max(self._least, 1):
            return False
        self._waiting[id] = num_held
        first = tuple(keys.of(self.step, limit)[:MAX_ASKED_KEYS])
        self._book.step.asks.append(
            AskPeers(request=id, keys=first, step=self.step, first=limits.peer)
        )
        return True

    def apply(self, results: StepResults) -> None:
        """Peers have been asked: their tickets are kept alive where they have more than is held
        already, for somebody who waits for it, or handed back."""
        for answer in results.peers:
            num_held = self._waiting.pop(answer.request, None)
            num_tokens = answer.tickets[0].num_tokens if answer.tickets else 0
            if num_held is None or num_tokens <= num_held:
                self._book.step.drops += answer.tickets
            else:
                handover = Handover(
                    tickets=answer.tickets, num_tokens=num_tokens, prompt="", from_peer=True
                )
                self._handovers.offer(answer.request, handover)

    def computes(self, id: str) -> None:
        self._requests.pop(id, None)
        if self._waiting.pop(id, None) is not None:
            step = self._book.step
            step.asks = [order for order in step.asks if order.request != id]

    def ended(self, id: str, ids: BlockIds, num_tokens: int) -> None:
        self.computes(id)

    def reset(self, identity: Identity) -> None:
        """Requests to come have keys of another identity: peers are not asked for older ones."""
        self._requests.clear()
        self._waiting.clear()
        self._book.step.asks = []
