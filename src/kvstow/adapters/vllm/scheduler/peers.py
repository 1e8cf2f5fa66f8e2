"""Which requests ask peers, in the scheduler."""

from math import gcd

from kvstow.adapters.vllm.protocol import (
    AskPeers,
    BlockIds,
    EngineRequest,
    Handover,
    StepResults,
)
from kvstow.adapters.vllm.scheduler.handovers import Handovers
from kvstow.adapters.vllm.scheduler.key_index import RequestKeys
from kvstow.adapters.vllm.scheduler.parts import EngineState, PrefixSource
from kvstow.plan.identity import Identity
from kvstow.transfer.channel.messages import MAX_ASKED_KEYS


class PeerQuestions(PrefixSource):
    """Which requests ask peers; each does so once. Holds no memory and waits for nothing."""

    def __init__(self, engine: EngineState, handovers: Handovers) -> None:
        self._engine, self._handovers = engine, handovers
        self.step = gcd(*(group.block_tokens for group in engine.groups))
        """Tokens from one key of a question to the next."""
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
        most = limits.up_to(len(request.tokens) - max(1, self._engine.ahead), num_held)
        limit = most // self._engine.unit * self._engine.unit
        has_peer = limits.allows("cpu", "remote") and (self._engine.options.peers or limits.peer)
        if not has_peer or limit - num_held < max(self._engine.options.peers_tokens, 1):
            return False
        self._waiting[id] = num_held
        first = tuple(keys.of(self.step, limit)[:MAX_ASKED_KEYS])
        self._engine.step.asks.append(
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
                self._engine.step.drops += answer.tickets
            else:
                handover = Handover(
                    tickets=answer.tickets, num_tokens=num_tokens, prompt="", from_peer=True
                )
                self._handovers.offer(answer.request, handover)

    def computes(self, id: str) -> None:
        self._requests.pop(id, None)
        if self._waiting.pop(id, None) is not None:
            step = self._engine.step
            step.asks = [order for order in step.asks if order.request != id]

    def ended(self, id: str, ids: BlockIds, num_tokens: int) -> None:
        self.computes(id)

    def reset(self, identity: Identity) -> None:
        """Requests to come have keys of another identity: peers are not asked for older ones."""
        self._requests.clear()
        self._waiting.clear()
        self._engine.step.asks = []
