"""What a store holds by tenant, limits on it, and the collector.

    survey    count objects and bytes, by tenant
    collect   remove rows: the oldest first, until ages and sizes are within bounds
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from secrets import token_hex
from threading import Lock

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.remote.clients.base import Blob, BlobClient, BlobFacts, Listing, whole_objects
from kvstow.offload.remote.directory import ROWS
from kvstow.offload.remote.url import RemoteOptions

USAGE = "usage"
_HEX = re.compile("(?:[0-9a-f]{2}){1,32}")
MOST_USAGE_BYTES = 1 << 20
YOUNG_SECONDS = 600.0
DELETE = 1000


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

    tenant: str
    identity: str
    layout: str
    group: int
    key: bytes
    facts: BlobFacts


@dataclass(frozen=True, slots=True)
class Collected:
    """What the collector did: rows and bytes removed, and what is left."""

    rows: int
    nbytes: int
    left: StoreUsage


def listed(client: BlobClient) -> Listing:
    """The client, if its store can say what is there."""
    if not isinstance(client, Listing):
        raise StoreError(
            f"{client.where}: this store cannot list its objects, so they cannot be counted\n\n"
            "hint: Mooncake evicts by itself; limits are the master's own options"
        )
    return client


def rows_in(client: BlobClient) -> Iterator[RowFacts]:
    """Every row object of every tenant."""
    for facts in listed(client).list_blobs(f"{ROWS}/"):
        parts = facts.name.split("/")
        if len(parts) == 6 and parts[4].isdecimal() and _HEX.fullmatch(parts[5]):
            key = bytes.fromhex(parts[5])
            yield RowFacts(parts[1], parts[2], parts[3], int(parts[4]), key, facts)


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
    now = _store_time(listed(client)) if clock is None else clock()
    rows = sorted(rows_in(client), key=lambda row: row.facts.modified)
    gone = _victims(rows, now, most, most_by_tenant, older_than)
    removed: set[str] = set()
    for at in range(0, len(gone), DELETE):
        names = {row.facts.name for row in gone[at : at + DELETE]}
        removed |= names - client.delete(list(names)).keys()
    counted_at = (clock or time.time)()
    left = _counted([row for row in rows if row.facts.name not in removed], counted_at)
    client.delete([USAGE])
    client.put([Blob(USAGE, np.frombuffer(json.dumps(asdict(left)).encode(), np.uint8))])
    nbytes = sum(row.facts.nbytes for row in gone if row.facts.name in removed)
    return Collected(len(removed), nbytes, left)


def _store_time(client: Listing) -> float:
    """What time it is by the clock that says how old rows are."""
    name = f"clock/{token_hex(16)}"
    client.put([Blob(name, np.zeros(1, np.uint8))])
    times = [facts.modified for facts in client.list_blobs("clock/") if facts.name == name]
    client.delete([name])
    return times[0] if times else time.time()


def _victims(
    rows: Sequence[RowFacts],
    now: float,
    most: int | None,
    most_by_tenant: int | None,
    older_than: float | None,
) -> list[RowFacts]:
    """The rows to remove, of rows by age."""
    counted = _counted(rows, now)
    total, tenants = counted.nbytes, dict(counted.tenants)
    gone: list[RowFacts] = []
    for row in rows:
        age = now - row.facts.modified
        if age < YOUNG_SECONDS:
            break
        too_old = older_than is not None and age > older_than
        too_much = most is not None and total > most
        theirs = most_by_tenant is not None and tenants[row.tenant] > most_by_tenant
        if too_old or too_much or theirs:
            gone.append(row)
            total -= row.facts.nbytes
            tenants[row.tenant] -= row.facts.nbytes
    return gone


def _counted(rows: Sequence[RowFacts], now: float) -> StoreUsage:
    tenants: dict[str, int] = {}
    for row in rows:
        tenants[row.tenant] = tenants.get(row.tenant, 0) + row.facts.nbytes
    return StoreUsage(now, len(rows), sum(tenants.values()), tenants)


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

    def refusal(self, nbytes: int, waiting: int = 0) -> str:
        """Why so many bytes more are too much, beside those that wait to be written, with the
        numbers; empty where they are not."""
        options, added = self._options, self._added + waiting
        mine = self._usage.tenants.get(options.tenant, 0) + added
        for what, used, limit in (
            (f"tenant {options.tenant!r}", mine, options.tenant_bytes),
            ("the store", self._usage.nbytes + added, options.max_bytes),
        ):
            if limit is not None and used + nbytes > limit:
                return f"{what} has {used:,} of {limit:,} bytes, {nbytes:,} more do not fit"
        return ""
