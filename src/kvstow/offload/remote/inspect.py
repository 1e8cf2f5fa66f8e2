"""What a remote store holds: `survey` counts, `verify` reads every row."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

from kvstow.errors import ManifestError
from kvstow.offload.remote.clients.base import BlobClient, whole_objects
from kvstow.offload.remote.collect import RowFacts, listed, rows_in
from kvstow.offload.remote.directory import MANIFEST_BYTES, ROWS, WriterLayout
from kvstow.offload.remote.objects import BadObject
from kvstow.plan.manifest import decode

LOT_BYTES = 32 << 20
Place = tuple[str, str, str]
"""Tenant, identity and layout, as they stand in names."""


@dataclass(frozen=True, slots=True)
class VerifiedObjects:
    """What a full reading of a remote store found. Damaged objects are removed."""

    rows: int
    nbytes: int
    damaged: tuple[tuple[str, str], ...]
    """Name and reason of every object that was not the row it should have been."""


def writers(client: BlobClient) -> dict[Place, WriterLayout]:
    """The layouts that rows were written in; those whose manifest cannot be read are left out."""
    names = [
        facts.name
        for facts in listed(client).list_blobs(f"{ROWS}/")
        if facts.name.split("/")[3:4] == ["manifest"]
    ]
    found: dict[Place, WriterLayout] = {}
    for name, data in zip(
        names, whole_objects(client, names, MANIFEST_BYTES) if names else [], strict=True
    ):
        _, tenant, identity, _, fingerprint = name.split("/")
        manifest = b"" if data is None else data.tobytes()
        if blake2b(manifest, digest_size=32).hexdigest() != fingerprint:
            continue
        try:
            layout = decode(manifest)
        except ManifestError:
            continue
        writer = WriterLayout(layout, fingerprint, manifest)
        found[tenant, identity, fingerprint[:32]] = writer
    return found


def survey(client: BlobClient) -> dict[str, Any]:
    """What a store holds by tenant and layout, as plain values."""
    known = writers(client)
    rows: dict[Place, list[RowFacts]] = {place: [] for place in known}
    for row in rows_in(client):
        rows.setdefault((row.tenant, row.identity, row.layout), []).append(row)
    layouts = [_layout(place, known.get(place), found) for place, found in sorted(rows.items())]
    tenants: dict[str, int] = {}
    for one in layouts:
        tenants[one["tenant"]] = tenants.get(one["tenant"], 0) + one["bytes"]
    return {
        "url": client.where,
        "rows": sum(one["rows"] for one in layouts),
        "bytes": sum(tenants.values()),
        "tenants": tenants,
        "layouts": layouts,
    }


def _layout(place: Place, writer: WriterLayout | None, rows: list[RowFacts]) -> dict[str, Any]:
    tenant, identity, short = place
    layout = None if writer is None else writer.layout
    times = [row.facts.modified for row in rows]
    return {
        "tenant": tenant,
        "identity": identity,
        "fingerprint": short if writer is None else writer.fingerprint,
        "model": None if layout is None else layout.model,
        "order": None if layout is None else layout.order,
        "tp": None if layout is None else list(layout.tp),
        "pp": None if layout is None else list(layout.pp),
        "block_tokens": None
        if layout is None
        else {placed.group.name: placed.group.block_tokens for placed in layout.groups},
        "rows": len(rows),
        "bytes": sum(row.facts.nbytes for row in rows),
        "oldest": min(times, default=None),
        "newest": max(times, default=None),
    }


def verify(
    client: BlobClient, progress: Callable[[int], None] = lambda rows: None
) -> VerifiedObjects:
    """Read every row and compare it with its checksums. What is damaged is removed; rows whose
    manifest is missing are named and stay, since their writer may publish it again."""
    known = writers(client)
    damaged: list[tuple[str, str]] = []
    count = nbytes = 0
    found = rows_in(client)
    while first := next(found, None):
        step = max(1, LOT_BYTES // max(1, first.facts.nbytes)) - 1
        lot = [first, *islice(found, step)]
        most = max(row.facts.nbytes for row in lot)
        blobs = whole_objects(client, [row.facts.name for row in lot], most)
        bad: list[str] = []
        for row, blob in zip(lot, blobs, strict=True):
            writer = known.get((row.tenant, row.identity, row.layout))
            if blob is None:  # collected meanwhile
                continue
            count, nbytes = count + 1, nbytes + blob.nbytes
            if writer is None or row.group >= len(writer.layout.groups):
                damaged.append((row.facts.name, "no manifest"))
                continue
            verdict = writer.objects(row.group).read(row.key, blob)
            if isinstance(verdict, BadObject):
                damaged.append((row.facts.name, verdict.value))
                bad += [row.facts.name] if verdict is not BadObject.VERSION else []
        if bad:
            client.delete(bad)
        progress(len(lot))
    return VerifiedObjects(count, nbytes, tuple(damaged))
