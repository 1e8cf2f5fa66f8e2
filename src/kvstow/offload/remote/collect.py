"""What a store holds: counted, verified, and collected when it is too much or too old.

    survey    count rows and bytes, by tenant and layout
    verify    read every row; what is damaged goes
    collect   list rows, sort them by age, delete the oldest until sizes and ages are within bounds
    Quota     what writers may add, by the collector's last count

The collector runs beside writers, readers and other collectors, as often as one likes
(`kvstow store prune URL`). It removes rows and nothing else: manifests stay, so that a row that is
being written is not orphaned. Ages are by the store's clock, and a row younger than ten minutes is
never removed. One that is removed while somebody reads it, or counts on it, is a miss, and a miss
is always allowed.

Its count is left in the store as `usage`. Writers with a limit read it every some seconds, add what
they have written since, and write no more when that is too much.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from secrets import token_hex
from threading import Lock
from typing import Any

import numpy as np

from kvstow.errors import ManifestError, StoreError
from kvstow.offload.remote.client import (
    Blob,
    BlobClient,
    BlobFacts,
    Listing,
    RemoteOptions,
    whole_objects,
)
from kvstow.offload.remote.directory import MANIFEST_BYTES, ROWS, WriterLayout
from kvstow.offload.remote.objects import BadObject
from kvstow.offload.tier import Bytes, Verified

USAGE = "usage"
_HEX = re.compile("(?:[0-9a-f]{2}){1,32}")
MOST_USAGE_BYTES = 1 << 20
YOUNG_SECONDS = 600.0
DELETE = 1000
LOT_BYTES = 32 << 20
NO_MANIFEST = "no manifest"

Place = tuple[str, str, str]
"""Tenant, identity and layout, as they stand in names."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Objects and bytes in a store when it was last counted, and bytes by tenant."""

    time: float = 0.0
    objects: int = 0
    nbytes: int = 0
    tenants: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class RowFacts:
    """A row object: whose it is, and what a listing says of it."""

    place: Place
    group: int
    key: bytes
    facts: BlobFacts

    @property
    def tenant(self) -> str:
        return self.place[0]


def _listing(client: BlobClient) -> Listing:
    """The client, if its store can say what is there."""
    if not isinstance(client, Listing):
        raise StoreError(
            f"{client.where}: this store cannot list its objects, so they cannot be counted\n\n"
            "hint: Mooncake evicts by itself; limits are the master's own options"
        )
    return client


def rows_in(client: BlobClient) -> Iterator[RowFacts]:
    """Every row object of every tenant."""
    for facts in _listing(client).list_blobs(f"{ROWS}/"):
        parts = facts.name.split("/")
        if len(parts) == 6 and parts[4].isdecimal() and _HEX.fullmatch(parts[5]):
            place = parts[1], parts[2], parts[3]
            yield RowFacts(place, int(parts[4]), bytes.fromhex(parts[5]), facts)


def writers(client: BlobClient) -> dict[Place, WriterLayout]:
    """The layouts that rows were written in; those whose manifest cannot be read are left out."""
    listing = _listing(client).list_blobs(f"{ROWS}/")
    names = [facts.name for facts in listing if facts.name.split("/")[3:4] == ["manifest"]]
    manifests = whole_objects(client, names, MANIFEST_BYTES) if names else []
    layouts: dict[Place, WriterLayout] = {}
    for name, data in zip(names, manifests, strict=True):
        base, _, fingerprint = name.rsplit("/", 2)
        manifest = b"" if data is None else data.tobytes()
        _, tenant, identity = base.split("/")
        with suppress(ManifestError):
            writer = WriterLayout.read(fingerprint, manifest, base)
            layouts[tenant, identity, fingerprint[:32]] = writer
    return layouts


# ── looking ───────────────────────────────────────────────────────────────────────────


def survey(client: BlobClient) -> dict[str, Any]:
    """What a store holds by tenant and layout, as plain values."""
    layouts_by_place = writers(client)
    rows: dict[Place, list[BlobFacts]] = {place: [] for place in layouts_by_place}
    for row in rows_in(client):
        rows.setdefault(row.place, []).append(row.facts)
    layouts = [
        _layout(place, layouts_by_place.get(place), facts) for place, facts in sorted(rows.items())
    ]
    tenants: Counter[str] = Counter()
    for one in layouts:
        tenants[one["tenant"]] += one["bytes"]
    return {
        "url": client.where,
        "rows": sum(one["rows"] for one in layouts),
        "bytes": sum(tenants.values()),
        "tenants": dict(tenants),
        "layouts": layouts,
    }


def _layout(place: Place, writer: WriterLayout | None, rows: list[BlobFacts]) -> dict[str, Any]:
    tenant, identity, short = place
    plan: dict[str, Any] = dict.fromkeys(("model", "order", "tp", "pp", "block_tokens"))
    if writer is not None:
        layout = writer.layout
        plan |= {"model": layout.model, "order": layout.order}
        plan |= {"tp": list(layout.tp), "pp": list(layout.pp)}
        plan["block_tokens"] = {r.group.name: r.group.block_tokens for r in layout.groups}
    times = [facts.modified for facts in rows]
    return {
        "tenant": tenant,
        "identity": identity,
        "fingerprint": short if writer is None else writer.fingerprint,
        **plan,
        "rows": len(rows),
        "bytes": sum(facts.nbytes for facts in rows),
        "oldest": min(times, default=None),
        "newest": max(times, default=None),
    }


def verify(client: BlobClient, progress: Callable[[int], None] = lambda rows: None) -> Verified:
    """Read every row and compare it with its checksums. What is damaged is removed; rows whose
    manifest is missing are named and stay, since their writer may publish it again."""
    layouts = writers(client)
    damaged: list[dict[str, Any]] = []
    count = nbytes = 0
    rows = rows_in(client)
    while first := next(rows, None):
        step = max(1, LOT_BYTES // max(1, first.facts.nbytes)) - 1
        lot = [first, *islice(rows, step)]
        most = max(row.facts.nbytes for row in lot)
        blobs = whole_objects(client, [row.facts.name for row in lot], most)
        bad: list[str] = []
        for row, blob in zip(lot, blobs, strict=True):
            if blob is None:  # collected meanwhile
                continue
            count, nbytes = count + 1, nbytes + blob.nbytes
            fault = _fault(layouts.get(row.place), row, blob)
            if fault:
                damaged.append({"name": row.facts.name, "reason": fault})
            if fault and fault not in (BadObject.VERSION, NO_MANIFEST):
                bad.append(row.facts.name)
        if bad:
            client.delete(bad)
        progress(len(lot))
    return Verified(count, nbytes, tuple(damaged))


def _fault(writer: WriterLayout | None, row: RowFacts, blob: Bytes) -> str:
    """Why an object is not the row that its name says; empty where it is."""
    if writer is None or row.group >= len(writer.layout.groups):
        return NO_MANIFEST
    verdict = writer.objects(row.group).read(row.key, blob)
    return verdict.value if isinstance(verdict, BadObject) else ""


# ── collecting ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Collected:
    """What the collector did: rows and bytes removed, and what is left."""

    rows: int
    nbytes: int
    left: StoreUsage


def collect(
    client: BlobClient,
    *,
    most: int | None = None,
    most_by_tenant: int | None = None,
    older_than: float | None = None,
    clock: Callable[[], float] | None = None,
) -> Collected:
    """Remove rows, the oldest first, until the store and each tenant are within bounds.

    `older_than` is an age in seconds: older rows go in any case. Leaves the count for writers.
    Ages are by the store's own clock unless there is another: one that is wrong here removes
    nothing that is young.
    """
    now = _store_time(_listing(client)) if clock is None else clock()
    rows = sorted(rows_in(client), key=lambda row: row.facts.modified)
    tenants = Counter[str]()
    for row in rows:
        tenants[row.tenant] += row.facts.nbytes
    gone: list[RowFacts] = []
    for row in rows:
        age = now - row.facts.modified
        if age < YOUNG_SECONDS:
            break
        if (
            (older_than is not None and age > older_than)
            or (most is not None and tenants.total() > most)
            or (most_by_tenant is not None and tenants[row.tenant] > most_by_tenant)
        ):
            gone.append(row)
            tenants[row.tenant] -= row.facts.nbytes
    kept: dict[str, str] = {}
    for at in range(0, len(gone), DELETE):
        kept |= client.delete([row.facts.name for row in gone[at : at + DELETE]])
    for row in gone:
        tenants[row.tenant] += row.facts.nbytes if row.facts.name in kept else 0
    removed = [row for row in gone if row.facts.name not in kept]
    left = StoreUsage(
        (clock or time.time)(), len(rows) - len(removed), tenants.total(), dict(+tenants)
    )
    client.delete([USAGE])
    client.put([Blob(USAGE, np.frombuffer(json.dumps(asdict(left)).encode(), np.uint8))])
    return Collected(len(removed), sum(row.facts.nbytes for row in removed), left)


def _store_time(client: Listing) -> float:
    """What time it is by the clock that says how old rows are."""
    name = f"clock/{token_hex(16)}"
    client.put([Blob(name, np.zeros(1, np.uint8))])
    times = [facts.modified for facts in client.list_blobs("clock/") if facts.name == name]
    client.delete([name])
    return times[0] if times else time.time()


# ── limits ────────────────────────────────────────────────────────────────────────────


def last_usage(client: BlobClient) -> StoreUsage | None:
    """The collector's last count; None where there is none."""
    data = whole_objects(client, [USAGE], MOST_USAGE_BYTES)[0]
    if data is None:
        return None
    try:
        return StoreUsage(**json.loads(data.tobytes()))
    except (ValueError, TypeError):
        return None


class Quota:
    """What a writer may still add, by the last count and what it has added since."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._usage = StoreUsage()
        self._added = 0
        self._lock = Lock()

    @property
    def is_limited(self) -> bool:
        return self._options.max_bytes is not None or self._options.tenant_bytes is not None

    def use(self, usage: StoreUsage | None) -> None:
        """Take over another count. Collectors' clocks may differ, so it need not look newer."""
        with self._lock:
            if usage is not None and usage.time != self._usage.time:
                self._usage, self._added = usage, 0

    def add(self, nbytes: int) -> None:
        """So many bytes were written here."""
        with self._lock:
            self._added += nbytes

    def refusal(self, nbytes: int, waiting: int) -> str:
        """Why so many bytes more are too much, beside those that wait to be written, with the
        numbers; empty where they are not."""
        options, added = self._options, self._added + waiting
        of_tenant = self._usage.tenants.get(options.tenant, 0) + added
        for what, used, limit in (
            (f"tenant {options.tenant!r}", of_tenant, options.tenant_bytes),
            ("the store", self._usage.nbytes + added, options.max_bytes),
        ):
            if limit is not None and used + nbytes > limit:
                return f"{what} has {used:,} of {limit:,} bytes, {nbytes:,} more do not fit"
        return ""
