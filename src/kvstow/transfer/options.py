"""Times and sizes of an agent, all in one place."""

from dataclasses import dataclass
from typing import Literal

from kvstow.errors import SpecError
from kvstow.transfer.path import Way
from kvstow.transfer.transport.parallel import TRACKS

DigestPolicy = Literal["always", "sample", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long things may take, in seconds, and what is forced.

    `transfer_seconds` is the deadline of a pull, connecting included. `drain_seconds` is
    how long a failed pull waits for its posts to end before it disconnects the peer.
    `direction` forces one way instead of measuring; `tracks` forces how many engines read
    at once, each in a thread of its own. `slot_bytes` is the size of staging slots: by
    default 32 MiB on a device and none on the host.
    """

    lease_seconds: float = 30.0
    transfer_seconds: float = 30.0
    contact_seconds: float = 5.0
    heartbeat_seconds: float = 1.0
    drain_seconds: float = 2.0
    direction: Way | None = None
    tracks: int | None = None
    slot_bytes: int | None = None
    digest: DigestPolicy = "sample"

    def __post_init__(self) -> None:
        for name in ("lease_seconds", "transfer_seconds", "contact_seconds",
                     "heartbeat_seconds", "drain_seconds"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise SpecError(f"{name} is {getattr(self, name)}, not above 0")
        if self.tracks is not None and not 1 <= self.tracks <= TRACKS:
            raise SpecError(f"tracks is {self.tracks}, not from 1 to {TRACKS}")


DEFAULTS = Options()
