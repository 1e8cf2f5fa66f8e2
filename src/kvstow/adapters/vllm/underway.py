"""Pulls and leases of one rank that are under way."""

from dataclasses import dataclass
from typing import Protocol

from kvstow.adapters.vllm.protocol import PullBlocks
from kvstow.errors import TransferError
from kvstow.transfer.lease import UNKNOWN
from kvstow.transfer.pulls import Transfer

GRACE_SECONDS = 10.0
"""A ticket may be shown before the producer's worker has heard of it: ask again so long."""

RETRY_SECONDS = 0.1


class StepsBegun(Protocol):
    """A point in the device's work: a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has come there."""
        ...


@dataclass(slots=True, eq=False)
class OpenPull:
    """A pull under way. A transfer that has failed may still be written to for a while. `steps`
    may write to its blocks, too: nothing is pulled before they are over."""

    pull: PullBlocks
    started: float
    steps: StepsBegun | None = None
    transfer: Transfer | None = None
    again_at: float = 0.0

    @property
    def may_write(self) -> bool:
        """Whether nobody else writes to its blocks."""
        return self.steps is None or self.steps.query()

    def may_retry(self, error: TransferError, now: float) -> bool:
        """Whether the producer may just not have heard of the ticket; a peer that was asked has."""
        is_young = now - self.started < GRACE_SECONDS
        return _may_come(error) and is_young and self.pull.seconds is None


@dataclass(slots=True, eq=False)
class AdoptedLease:
    """A lease of one request's blocks. `ordered`: the engine's step has named it too, so that its
    blocks are counted as kept for the request."""

    lease: int
    request: str
    ordered: bool = False
    ended: bool = False


def _may_come(error: TransferError) -> bool:
    """Whether a producer's worker has only not heard of the ticket yet. Forged ones it tells apart
    by their number."""
    return error.kind == "ticket" and UNKNOWN in str(error)
