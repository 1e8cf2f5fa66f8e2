"""Times and sizes of an agent, all in one place."""

from dataclasses import dataclass, fields
from math import inf
from typing import Literal, get_args

from kvstow.errors import SpecError
from kvstow.transfer.channel.messages import Way as Way

LEAST_SLOT_BYTES = 32
"""A slot holds at least a few copies: smaller ones would make as many messages as copies."""

DigestPolicy = Literal["always", "sample", "off"]

SILENT_BEATS = 30
"""An agent that was silent for so many heartbeats is given up, or forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Time limits in seconds, and settings that replace what an agent would choose.

    `transfer_seconds` is the deadline of a pull, connecting included. `drain_seconds` is
    how long a failed pull waits for its posts to end before its peer is given up, and how long
    an engine that is replaced waits for what moves. It is replaced when rows have been in
    quarantine for `quarantine_seconds`; for a third of them if they are more than
    `quarantine_share` of all.
    `mapped` is whether peers on this node may map our memory, and we theirs. `direction` forces
    one way instead of measuring. `slot_bytes` is the size of each of four
    slots: by default 2 MiB, and 32 where the arena is on a device. `copy_programs` is how many
    programs a copy inside a device may have: fewer leave more of it to others, for longer.
    """

    lease_seconds: float = 30.0
    transfer_seconds: float = 30.0
    contact_seconds: float = 5.0
    heartbeat_seconds: float = 1.0
    drain_seconds: float = 2.0
    quarantine_seconds: float = 30.0
    quarantine_share: float = 0.1
    mapped: bool = True
    direction: Way | None = None
    slot_bytes: int | None = None
    copy_programs: int | None = None
    digest: DigestPolicy = "sample"

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name.endswith("_seconds")):
            seconds = getattr(self, name)
            if isinstance(seconds, str) or not 0 < seconds < inf:
                raise SpecError(f"{name} is {seconds!r}, not a number of seconds above 0")
        check_words(self.direction, self.digest)
        if self.slot_bytes is not None and self.slot_bytes < LEAST_SLOT_BYTES:
            raise SpecError(
                f"slot_bytes is {self.slot_bytes}, not at least {LEAST_SLOT_BYTES}\n\n"
                "hint: leave it out for 2 MiB, and 32 on a device"
            )
        if self.copy_programs is not None and self.copy_programs < 1:
            raise SpecError(
                f"copy_programs is {self.copy_programs}, not at least 1\n\n"
                "hint: leave it out for two per multiprocessor of an H200"
            )


def check_words(direction: Way | None, digest: DigestPolicy | None) -> None:
    """SpecError for an unknown direction or digest policy."""
    for what, word, words in (
        ("direction", direction, get_args(Way)),
        ("digest", digest, get_args(DigestPolicy)),
    ):
        if word is not None and word not in words:
            raise SpecError(f"{what} is {word!r}\n\nhint: one of {', '.join(words)}")


DEFAULTS = Options()
