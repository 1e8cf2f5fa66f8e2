"""Which way the bytes go: measured at first contact, because it can be a factor of 300."""

from dataclasses import dataclass

from kvstow.transfer.options import Way

PREFER_READ = 2.0
"""Other ways cost the producer work: they have to be so much faster to be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The chosen direction, and the rates it was chosen by, in bytes per second.

    `staged_rate` is 0 where both sides' rows are in host memory: nothing to gain.
    """

    direction: Way
    read_rate: float
    write_rate: float
    staged_rate: float = 0.0
    forced: bool = False

    @property
    def rate(self) -> float:
        match self.direction:
            case "read":
                return self.read_rate
            case "write":
                return self.write_rate
            case "staged":
                return self.staged_rate


def chosen(
    read_rate: float,
    write_rate: float,
    staged_rate: float = 0.0,
    forced: Way | None = None,
) -> Path:
    """The fastest way, unless one is forced; the simpler one where they are about equal."""
    best: Way = "write" if write_rate > PREFER_READ * read_rate else "read"
    if staged_rate > PREFER_READ * max(read_rate, write_rate):
        best = "staged"
    return Path(
        direction=forced or best,
        read_rate=read_rate,
        write_rate=write_rate,
        staged_rate=staged_rate,
        forced=forced is not None,
    )
