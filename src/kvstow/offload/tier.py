"""What a tier is: a place that keeps rows by key, up to a capacity, and may evict them.

    device arena ⇄ host tier ⇄ disk tier ⇄ anything else that keeps this protocol

A row is known by its group and the hash of its block, a string of 1 to 32 bytes that names
the content and all content before it: two rows of one name are equal. A tier never promises to
keep a row; it promises never to return another one.
"""

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.rows import Bytes
from kvstow.plan.identity import HINT, Identity
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Bools

log = logging.getLogger("kvstow.offload")

MAX_KEY_BYTES = 32

_T = TypeVar("_T")

Reasons = Mapping[str, Mapping[str, float]]
"""Numbers of rows by reason, under the keys of `metrics.TIER_REASONS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Rows kept, the bytes that are set aside for them, and the most there may be."""

    rows: int
    nbytes: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What a tier has done since it was opened."""

    hits: int = 0
    misses: int = 0
    stored_rows: int = 0
    stored_bytes: int = 0
    loaded_rows: int = 0
    loaded_bytes: int = 0
    evicted_rows: int = 0
    failures: int = 0
    """Rows that could not be written, or were read and not what they should have been."""


class Tallies:
    """Numbers by name that several threads add to."""

    def __init__(self) -> None:
        self._now: Counter[str] = Counter()
        self._lock = Lock()

    def add(self, name: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._now[name] += count

    def add_rows(self, what: str, num_rows: int, row_bytes: int) -> None:
        """So many rows were "stored" or "loaded"."""
        self.add(f"{what}_rows", num_rows)
        self.add(f"{what}_bytes", num_rows * row_bytes)

    def add_load(self, num_keys: int, num_rows: int, row_bytes: int) -> None:
        """A load has found so many of its rows."""
        self.add("hits", num_rows)
        self.add("misses", num_keys - num_rows)
        self.add_rows("loaded", num_rows, row_bytes)

    @property
    def now(self) -> dict[str, int]:
        """The numbers at this moment."""
        with self._lock:
            return dict(sorted(self._now.items()))


class Tier(Protocol):
    """One place that keeps rows by key. `rows` are flat byte arrays, one per key, as long as the
    group's row."""

    @property
    def name(self) -> str: ...

    @property
    def layout(self) -> Layout:
        """The layout whose rows are kept; only the shape of the rows matters."""
        ...

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        """Which rows are here now. A row may be gone a moment later."""
        ...

    def store(
        self,
        group: int,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        links: Sequence[ChainLink] = (),
    ) -> Bools:
        """Keep rows; which of them are kept now. A row already there counts as kept.

        `links`, one per row or none, say where blocks stand in their sequences. Only a disk keeps
        them, for `kvstow store convert`.
        """
        ...

    def load(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> Bools:
        """Copy rows out; which of them were here. The others' bytes are unspecified."""
        ...

    def evict(self, group: int, keys: Sequence[bytes]) -> int:
        """Forget rows; how many were here."""
        ...

    @property
    def usage(self) -> Usage: ...

    @property
    def counts(self) -> Counts: ...

    def close(self) -> None:
        """Let go of memory and files."""
        ...


# ── several tiers of the same rows, the fastest first ─────────────────────────────────────


def held_by_any(tiers: Sequence[Tier], group: int, keys: Sequence[bytes]) -> Bools:
    """Which rows are in one of the tiers; a later tier is asked only for what is still lacking."""
    present = np.zeros(len(keys), bool)
    for tier in tiers:
        if not present.all():
            present[~present] = tier.contains(group, select(keys, ~present))
    return present


def store_in_all(
    tiers: Sequence[Tier],
    group: int,
    keys: Sequence[bytes],
    rows: Sequence[Bytes],
    links: Sequence[ChainLink] = (),
) -> Bools:
    """Keep rows in every tier; which of them some tier keeps now."""
    kept = np.zeros(len(keys), bool)
    for tier in reversed(tiers):
        kept |= tier.store(group, keys, rows, links)
    return kept


def load_from_first(
    tiers: Sequence[Tier], group: int, keys: Sequence[bytes], rows: Sequence[Bytes]
) -> Bools:
    """Copy each row out of the first tier that has it; which of them were there."""
    present = np.zeros(len(keys), bool)
    for tier in tiers:
        if not present.all():
            left = ~present
            present[left] = tier.load(group, select(keys, left), select(rows, left))
    return present


@dataclass(frozen=True, slots=True)
class Verified:
    """What a full reading of a store found. What is damaged is dropped when it is over."""

    rows: int
    nbytes: int
    damaged: tuple[dict[str, Any], ...]
    """What there is to say of every row that was not what it should have been."""


def known_identity(layout: Layout, identity: Identity | None, what: str) -> Identity:
    """The identity given, else the layout's; StoreError where there is neither, or they differ."""
    if not isinstance(layout, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreError(
            f"{what} needs a Layout, not {type(layout).__name__}\n\n"
            "hint: a plan has one, plan.layout"
        )
    if identity is None:
        identity = layout.identity
    if identity is None:
        raise StoreError(
            f"{what}: the identity of these rows is not known, so rows of another "
            f"computation could be taken for them\n\n{HINT}"
        )
    if not isinstance(identity, Identity):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreError(f"{what}: an identity is {type(identity).__name__}\n\n{HINT}")
    differences = () if layout.identity is None else layout.identity.differences(identity)
    if differences:
        raise StoreError(f"{what}: two identities were given:\n" + "\n".join(differences))
    return identity


def check_process(opener: int, what: str) -> None:
    """StoreError in a process that was forked after `what` was opened: locks, threads and
    connections are the other process's, and both would write to the same places."""
    if os.getpid() != opener:
        raise StoreError(
            f"{what} was opened by process {opener}, and this is process {os.getpid()}, forked "
            "from it\n\nhint: open it after the fork, or start processes by spawn"
        )


def note_unverified(identity: Identity | None, what: str) -> None:
    """Say in the log that nobody has looked at the weights, where that is so."""
    if identity is not None and not identity.is_verified:
        why = identity.unverified_because
        log.warning("%s: identity is not verified: %s", what, why)


def checked_keys(layout: Layout, group: int, keys: Sequence[bytes]) -> Sequence[bytes]:
    """The keys, once it is certain that they are keys, and the group is a group."""
    if not 0 <= group < len(layout.groups):
        raise StoreError(f"no group {group}: the layout has {len(layout.groups)}")
    if not set(map(type, keys)) <= {bytes}:
        kinds = sorted({type(key).__name__ for key in keys})
        raise StoreError(f"keys are {', '.join(kinds)}, not bytes\n\nhint: kvstow.block_keys(…)")
    if not all(1 <= length <= MAX_KEY_BYTES for length in set(map(len, keys))):
        key = next(key for key in keys if not 1 <= len(key) <= MAX_KEY_BYTES)
        raise StoreError(f"key {key.hex()!r} has {len(key)} bytes, not 1 to {MAX_KEY_BYTES}")
    return keys


def checked_rows(layout: Layout, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> None:
    """Refuses rows that are not one per key, and each as long as the group's."""
    if len(keys) != len(rows):
        raise StoreError(f"{len(keys)} keys for {len(rows)} rows")
    nbytes = layout.row_bytes(group)
    for row in rows:
        if row.nbytes != nbytes:
            raise StoreError(
                f"group {layout.groups[group].group.name!r}: a row of {row.nbytes} bytes, "
                f"not {nbytes}"
            )


def first_positions(keys: Sequence[bytes]) -> dict[bytes, int]:
    """Where each key stands first, in the order of the keys."""
    positions: dict[bytes, int] = {}
    for i, key in enumerate(keys):
        positions.setdefault(key, i)
    return positions


def select(each: Sequence[_T], mask: Bools) -> list[_T]:
    """Those of the keys, or whatever there is one of per row, whose positions are true; none of
    none."""
    return list(compress(each, mask.tolist()))
