"""Which way pieces take over a network, by rates: an agent measures them, a nominal link has them.

Every way has two rates, of one long piece and of many short ones. Pieces count as what they
are like; there is no model of costs in between.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

PROBE_BYTES = 4 << 20
"""So much is copied to measure a rate, in one piece and in many."""

PROBE_COPIES = 512
"""So many short pieces are copied: they are of 8 KiB, like a page of one head."""

LONG_BYTES = 32 << 10
"""A piece from this length on counts as a long one."""

PREFER_READ = 2.0
"""Other ways cost the producer work: they have to be so much faster to be chosen."""

SLOTS_SHARE = 0.7
"""What is left of the rate between two hosts' memories when rows are copied on both ends."""


class Rates(NamedTuple):
    """Bytes per second of a long piece, and of many short ones; 0 where not measured."""

    long: float = 0.0
    short: float = 0.0


NO_RATES = Rates()


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The way to take, by what each brings. `slots` is the same for all pieces."""

    read: Rates = NO_RATES
    write: Rates = NO_RATES
    slots: float = 0.0

    def way_of(self, mean_bytes: int) -> Literal["read", "write", "slots"]:
        """The fastest way for pieces of this length; the simpler one where two are about equal."""
        which = 0 if mean_bytes >= LONG_BYTES else 1
        read, write = self.read[which], self.write[which]
        if self.slots > PREFER_READ * max(read, write):
            return "slots"
        return "write" if write > PREFER_READ * read else "read"
