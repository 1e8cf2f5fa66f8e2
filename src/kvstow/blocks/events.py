"""Events: what became cached and what is gone, for routers and for those who offload.

Numbered without gaps, kept for a while, so that a reader who was away can catch up or
learn that it has to start over.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvstow.blocks.prompt import Hashes
from kvstow.errors import BlockError
from kvstow.plan.view import Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockEvent:
    """Blocks of one group that can be found by their hashes from now on, or no longer.

    `parent` is the hash of the block before the first stored one, 0 at the beginning of
    a prompt.
    """

    sequence: int
    kind: Literal["stored", "removed"]
    group: int
    block_tokens: int
    hashes: Hashes
    ids: Ints
    parent: int = 0


class BlockEvents:
    """The last `capacity` events."""

    def __init__(self, capacity: int = 1 << 14) -> None:
        self._log: deque[BlockEvent] = deque(maxlen=capacity)
        self.next_sequence = 0
        self.on_event: list[Callable[[BlockEvent], None]] = []

    def stored(
        self, group: int, block_tokens: int, hashes: Hashes, ids: Ints, *, parent: int
    ) -> None:
        self._write("stored", group, block_tokens, hashes, ids, parent)

    def removed(self, group: int, block_tokens: int, hashes: Hashes, ids: Ints) -> None:
        self._write("removed", group, block_tokens, hashes, ids, 0)

    def since(self, sequence: int) -> Iterator[BlockEvent]:
        """Events from that number on, oldest first; raises if some are gone already."""
        oldest = self.next_sequence - len(self._log)
        if not oldest <= sequence <= self.next_sequence:
            raise BlockError(
                f"event {sequence} is not among those kept, {oldest} … {self.next_sequence}\n\n"
                "hint: start over from what is cached now"
            )
        return islice(iter(self._log), sequence - oldest, None)

    def _write(
        self,
        kind: Literal["stored", "removed"],
        group: int,
        block_tokens: int,
        hashes: Hashes,
        ids: Ints,
        parent: int,
    ) -> None:
        event = BlockEvent(
            sequence=self.next_sequence,
            kind=kind,
            group=group,
            block_tokens=block_tokens,
            hashes=hashes,
            ids=ids,
            parent=parent,
        )
        self.next_sequence += 1
        self._log.append(event)
        for listener in self.on_event:
            listener(event)
