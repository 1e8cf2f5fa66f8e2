"""Which way the bytes go: measured at first contact, because it can be a factor of 300."""

from dataclasses import dataclass

from kvstow.transfer.transport import Direction

PREFER_READ = 2.0
"""Writing costs the producer work: it has to be so much faster to be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The chosen direction, and the rates it was chosen by, in bytes per second."""

    direction: Direction
    read_rate: float
    write_rate: float
    forced: bool = False

    @property
    def rate(self) -> float:
        return self.read_rate if self.direction == "read" else self.write_rate


def chosen(read_rate: float, write_rate: float, forced: Direction | None) -> Path:
    """The faster direction, unless one is forced; reading where they are about equal."""
    faster: Direction = "write" if write_rate > PREFER_READ * read_rate else "read"
    return Path(
        direction=forced or faster,
        read_rate=read_rate,
        write_rate=write_rate,
        forced=forced is not None,
    )
