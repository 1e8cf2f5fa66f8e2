"""Everything kvstow raises on purpose.

    KvstowError
    ├── SpecError            a field, layer or model that cannot exist
    │   └── ModelError       a config.json with missing or contradictory facts
    ├── PlanError            constraints that no layout can meet
    ├── LayoutError          a layout that breaks a law (carries every violation)
    ├── ManifestError        a manifest document that cannot be read
    ├── RouteError           two layouts that no route can join
    ├── OutOfBlocks          a hold or an admission that does not fit
    ├── BlockError           ids that are not held, out of range, or named twice
    │   └── WrongThread      a pool changed in another thread than its owner's
    ├── TraceError           a request trace that cannot be replayed
    ├── ArenaError           memory that the system refuses, or that is gone
    │   └── NotShared        memory that another process cannot map
    ├── MemoryLayoutError    foreign memory that contradicts its declared layout
    ├── CopyError            a copy that failed, with its blocks
    ├── TransferError        bytes that were not moved, or moved and not accepted
    ├── StoreError           an offload tier that refused, lost or dropped rows
    └── BackendMissing       an optional part that is not installed

A message says where, what, both numbers, and after an empty line `hint:` what to do.
"""

from collections.abc import Mapping
from typing import Literal


class KvstowError(Exception):
    """Root of the tree."""


class SpecError(KvstowError):
    """A field, layer or retention that cannot exist."""


class ModelError(SpecError):
    """A model configuration with missing or contradictory facts."""


class PlanError(KvstowError):
    """Constraints or budgets that no layout can meet."""


class LayoutError(KvstowError):
    """A layout that breaks a law."""

    def __init__(self, violations: tuple[str, ...]) -> None:
        self.violations = violations
        super().__init__("\n".join(violations))


class ManifestError(KvstowError):
    """A manifest document that cannot be read: `kind` says which rule it broke."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {message}")


class RouteError(KvstowError):
    """Two layouts that no route can join; `differences` lists all of them."""

    def __init__(self, differences: tuple[str, ...]) -> None:
        self.differences = differences
        super().__init__("\n".join(differences))


class OutOfBlocks(KvstowError):
    """A hold or admission that does not fit; nothing was changed."""

    def __init__(self, message: str, *, needed: int, free: int) -> None:
        self.needed = needed
        self.free = free
        super().__init__(message)


class BlockError(KvstowError):
    """Ids that are not held, out of range, or named twice."""


class WrongThread(BlockError):
    """A pool that is changed in another thread than its owner's; nothing was changed."""


class TraceError(KvstowError):
    """A request trace that cannot be replayed."""


class ArenaError(KvstowError):
    """Memory that the system refuses, or that is closed."""


class NotShared(ArenaError):
    """Memory that another process cannot map: `reason` is one word for all of a kind."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class MemoryLayoutError(KvstowError):
    """Foreign memory that contradicts the layout declared for it."""


class CopyError(KvstowError):
    """A copy that failed; names its blocks."""


FaultKind = Literal[
    "peer",  # the other process died, or its connection broke
    "timeout",  # no end within the deadline
    "refused",  # layouts that do not fit, a key that is not known
    "ticket",  # forged, garbled or out of range
    "used",  # a ticket whose readers have all come
    "expired",  # a lease that ran out, or was taken back by the producer
    "fence",  # a source row was given to somebody else before the last byte had arrived
    "digest",  # the bytes that arrived are not the bytes that were offered
    "aborted",  # somebody on this side gave up
    "transport",  # anything else the engine below reported
]


class TransferError(KvstowError):
    """Bytes that were not moved, or were moved and not accepted.

    `peer` is the agent on the other side, `blocks` the destination ids by group name:
    none of them holds anything that may be used.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: FaultKind,
        peer: str = "",
        blocks: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.kind: FaultKind = kind
        self.peer = peer
        self.blocks = dict(blocks or {})
        super().__init__(message)


class StoreError(KvstowError):
    """An offload tier that refused, lost or dropped rows; `blocks` are `(group, id)` pairs."""

    def __init__(self, message: str, *, blocks: tuple[tuple[int, int], ...] = ()) -> None:
        self.blocks = blocks
        super().__init__(message)


class BackendMissing(KvstowError):
    """An optional part that is not installed; the hint names the extra, or the packages, to
    install."""

    def __init__(self, module: str, extra: str = "", *, install: str = "") -> None:
        packages = install or f"'kvstow[{extra}]'"
        super().__init__(f"{module} is not installed\n\nhint: pip install {packages}")
