"""Requests: what the ledger knows of each, in arrays, by slot.

A request's handle is its slot and how often the slot was used before, so that a handle
that outlived its request is noticed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstow.blocks.prefix import PromptSource
from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError
from kvstow.plan.view import Ints

SLOT_BITS = 32
_SLOT = (1 << SLOT_BITS) - 1


class Requests:
    """Slots of requests; `num_tokens[slot]` tokens have their rows.

    Of `num_known` tokens the ids are known; the blocks of `num_stored` tokens have been
    stored as prefixes. `forked` requests may share a block that is not full. `sources` have the
    prompts of those whose tokens are known.
    """

    def __init__(self) -> None:
        self.num_tokens = np.zeros(0, np.int64)
        self.num_known = np.zeros(0, np.int64)
        self.num_stored = np.zeros(0, np.int64)
        self.forked = np.zeros(0, np.bool_)
        self.sources: list[PromptSource | None] = []
        self._handle = np.zeros(0, np.int64)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._handle) - len(self._free)

    def _widen(self) -> None:
        """Make room for more requests."""
        before = len(self._handle)
        more = max(64, before)
        wide = np.zeros(more, np.int64)
        self._free += range(before + more - 1, before - 1, -1)
        self.num_tokens = np.concatenate((self.num_tokens, wide))
        self.num_known = np.concatenate((self.num_known, wide))
        self.num_stored = np.concatenate((self.num_stored, wide))
        self.forked = np.concatenate((self.forked, wide.astype(np.bool_)))
        self._handle = np.concatenate((self._handle, ~np.arange(before, before + more)))
        self.sources += [None] * more

    def open(self, num_tokens: int, prompt: Prompt | None, num_stored: int) -> int:
        """Begin a request in a free slot."""
        if not self._free:
            self._widen()
        slot = self._free.pop()
        self._handle[slot] = ~self._handle[slot]
        self.num_tokens[slot] = num_tokens
        self.num_known[slot] = 0 if prompt is None else len(prompt)
        self.num_stored[slot] = num_stored
        self.forked[slot] = False
        self.sources[slot] = None if prompt is None else PromptSource(prompt)
        return slot

    def close(self, slot: int) -> None:
        self._handle[slot] = ~(self._handle[slot] + (1 << SLOT_BITS))
        self.sources[slot] = None
        self._free.append(slot)

    def handle(self, slot: int) -> int:
        return int(self._handle[slot])

    def slots(self, requests: int | Sequence[int] | npt.NDArray[np.int64]) -> Ints:
        """The slots of living requests; raises for any other."""
        handles = _numbers(requests)
        slots = handles & _SLOT
        if (
            len(slots)
            and slots.max() < len(self._handle)
            and (self._handle[slots] == handles).all()
        ):
            return slots
        for handle, slot in zip(handles.tolist(), slots.tolist(), strict=True):
            if slot >= len(self._handle) or self._handle[slot] != handle:
                raise BlockError(
                    f"request {handle} is not known: released already, or never admitted"
                )
        return slots

    def living(self) -> Ints:
        """The slots in use."""
        return np.nonzero(self._handle >= 0)[0]

    def check_distinct(self, slots: Ints) -> None:
        """Raises if a request is named twice."""
        if len(slots) > 1 and (count := len(np.unique(slots))) < len(slots):
            raise BlockError(f"{len(slots)} requests are named, {count} are there")


def _numbers(requests: object) -> Ints:
    """What requests are named by, as an array; raises for anything but whole numbers."""
    handles = np.atleast_1d(np.asarray(requests))
    if handles.size and handles.dtype.kind not in "iu":
        kinds = {type(each).__name__ for each in handles.ravel().tolist()}
        raise BlockError(
            f"requests are named by whole numbers, not by {', '.join(sorted(kinds))}\n\n"
            "hint: ledger.admit(...).request is one"
        )
    return handles.astype(np.int64, copy=False)
