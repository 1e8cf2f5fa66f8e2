"""Which requests ask peers, in the scheduler."""

from collections.abc import Sequence
from math import gcd, lcm

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import AskPeers, EngineRequest, Handover, PeersAnswer
from kvstow.adapters.vllm.scheduler.stored import RequestKeys
from kvstow.plan.group import Group
from kvstow.transfer.channel.messages import MAX_ASKED_KEYS


class PeerQuestions:
    """Which requests ask peers; each does so once. Holds no memory and waits for nothing."""

    def __init__(self, groups: Sequence[Group], options: ConnectorOptions) -> None:
        sizes = [group.block_tokens for group in groups]
        self.step, self._unit = gcd(*sizes), lcm(*sizes)
        """Tokens from one key of a question to the next."""
        self._least = options.peers_tokens
        self._requests: dict[str, tuple[EngineRequest, RequestKeys]] = {}
        self._waiting: dict[str, int] = {}
        """Tokens that were held when peers were asked."""
        self._orders: list[AskPeers] = []

    def arrived(self, request: EngineRequest, keys: RequestKeys) -> None:
        """A request is queued. It has `keys` after every `step` tokens."""
        if request.shareable:
            self._requests[request.id] = request, keys

    def waits(self, id: str, num_held: int) -> bool:
        """Whether peers are being asked for what is missing behind the first tokens."""
        if id in self._waiting:
            return True
        if id not in self._requests:
            return False
        request, keys = self._requests.pop(id)
        limit = (len(request.tokens) - 1) // self._unit * self._unit
        if limit - num_held < max(self._least, 1):
            return False
        self._waiting[id] = num_held
        asked = tuple(keys.of(self.step, limit)[:MAX_ASKED_KEYS])
        self._orders.append(AskPeers(request=id, keys=asked, step=self.step))
        return True

    def handover(self, answer: PeersAnswer) -> Handover | None:
        """What an answer brings: more than is held already, for somebody who waits for it."""
        num_held = self._waiting.pop(answer.request, None)
        if num_held is None or not answer.tickets:
            return None
        num_tokens = answer.tickets[0].num_tokens
        if num_tokens <= num_held:
            return None
        return Handover(tickets=answer.tickets, num_tokens=num_tokens, prompt="", asked=True)

    def reset(self) -> None:
        """Requests to come have keys of another identity: peers are not asked for older ones."""
        self._requests.clear()
        self._waiting.clear()
        self._orders.clear()

    def forget(self, id: str) -> None:
        """The request is over, or computes."""
        self._requests.pop(id, None)
        if self._waiting.pop(id, None) is not None:
            self._orders = [order for order in self._orders if order.request != id]

    def take(self) -> tuple[AskPeers, ...]:
        """Questions for the first rank; told once."""
        orders, self._orders = tuple(self._orders), []
        return orders
