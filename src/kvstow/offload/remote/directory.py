"""Who writes to a store: the layouts of all writers of one computation.

    rows1/TENANT/IDENTITY/layout/000 …    entries, each the fingerprint of a writer's layout
    rows1/TENANT/IDENTITY/manifest/FP     the manifest with that fingerprint
    rows1/TENANT/IDENTITY/FP/GROUP/KEY    a row

Nothing is agreed in advance and nothing is listed: a writer takes the first entry that is free,
which works on every store that makes an object only if there is none, and a reader asks for the
entries a few at a time until a whole batch is empty. Everything lies below the identity of the
computation: another checkpoint, adapter or rope finds an empty directory.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from threading import Lock

import numpy as np

from kvstow.errors import ManifestError
from kvstow.offload.remote.client import THERE, Blob, BlobClient, StoreFull, whole_objects
from kvstow.offload.remote.objects import RowObjects
from kvstow.offload.rows import row_layout
from kvstow.offload.tier import Bytes
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import decode, encode

log = logging.getLogger("kvstow.offload")

BATCH = 16
"""Entries that are asked for at once."""

MOST_ENTRIES = 1024

ROWS = "rows1"
"""Where objects of this version lie. Older and newer ones lie elsewhere."""

MANIFEST_BYTES = 1 << 20
_DIGITS = 64
"""Of a fingerprint."""


@dataclass(frozen=True, eq=False)
class WriterLayout:
    """A layout that rows were written in, its fingerprint, and below what its objects lie."""

    layout: Layout
    fingerprint: str
    manifest: bytes = field(repr=False)
    base: str = ""

    @staticmethod
    def of(layout: Layout, base: str = "") -> "WriterLayout":
        """The rows of an arena's layout, as `row_layout` makes them."""
        rows = row_layout(layout)
        manifest = encode(rows)
        return WriterLayout(rows, _fingerprint(manifest), manifest, base)

    @staticmethod
    def read(fingerprint: str, manifest: bytes, base: str) -> "WriterLayout":
        """What a manifest with that name states. Raises ManifestError."""
        if _fingerprint(manifest) != fingerprint:
            raise ManifestError("fingerprint", "its bytes are others")
        return WriterLayout(decode(manifest), fingerprint, manifest, base)

    def objects(self, group: int) -> RowObjects:
        """Row objects of a group."""
        return self._objects[group]

    @cached_property
    def _objects(self) -> tuple[RowObjects, ...]:
        fingerprint, folder = self.fingerprint, f"{self.base}/{self.fingerprint[:32]}"
        return tuple(
            RowObjects(self.layout, bytes.fromhex(fingerprint), group, folder)
            for group in range(len(self.layout.groups))
        )


class Directory:
    """The layouts of one computation's writers, as far as they have been looked at."""

    def __init__(self, client: BlobClient, tenant: str, identity: Identity) -> None:
        self._client = client
        self._identity = identity
        self.base = f"{ROWS}/{tenant}/{identity.digest.hex()[:32]}"
        self._layouts: dict[str, WriterLayout] = {}
        self._refused: set[str] = set()
        self._lock = Lock()

    @property
    def layouts(self) -> tuple[WriterLayout, ...]:
        """The layouts that are known here, in the order of their entries."""
        with self._lock:
            return tuple(self._layouts.values())

    def publish(self, own: WriterLayout) -> None:
        """Make sure that others find this layout. Asks first, so that it may be called often.

        Raises StoreFull where there is no room for it: rows would not be found by anybody.
        """
        with self._lock:
            self._layouts.setdefault(own.fingerprint, own)
        name = f"{self.base}/manifest/{own.fingerprint}"
        self._make(name, np.frombuffer(own.manifest, np.uint8))
        content = np.frombuffer(own.fingerprint.encode(), np.uint8)
        for entries in self._entries():
            if own.fingerprint in entries.values():
                return
            for name in (name for name, text in entries.items() if not text):
                self._make(name, content)  # somebody else may be faster
                if self._texts([name]) == [own.fingerprint]:
                    return
        log.warning("%s: no free entry for a layout among %d", self._client.where, MOST_ENTRIES)

    def _make(self, name: str, data: Bytes) -> None:
        reason = self._client.put([Blob(name, data)]).get(name, THERE)
        if reason != THERE:
            raise StoreFull(f"{self._client.where}: {name} of {data.nbytes} bytes: {reason}")

    def refresh(self) -> None:
        """Look which layouts there are. Manifests that cannot be used are noted once."""
        fingerprints: list[str] = []
        for entries in self._entries():
            fingerprints += filter(None, entries.values())
            if not any(entries.values()):
                break
        seen = {*self._layouts, *self._refused}
        fresh = [each for each in dict.fromkeys(fingerprints) if each not in seen]
        names = [f"{self.base}/manifest/{fp}" for fp in fresh]
        manifests = whole_objects(self._client, names, MANIFEST_BYTES) if fresh else []
        for fingerprint, data in zip(fresh, manifests, strict=True):
            if data is not None:
                self._enter(fingerprint, data)

    def _enter(self, fingerprint: str, data: Bytes) -> None:
        """Keep a manifest that says what its name says, and is of this computation."""
        try:
            writer = WriterLayout.read(fingerprint, data.tobytes(), self.base)
            identity, footprints = writer.layout.identity, writer.layout.footprints
            if identity is None or identity.digest != self._identity.digest:
                raise ManifestError("identity", "it is of another computation")
            if any(len(footprint.strips) != 1 for footprint in footprints):
                raise ManifestError("rows", "they are not single runs")
        except ManifestError as error:
            self._refused.add(fingerprint)
            log.warning("%s: manifest %s is not used: %s", self._client.where, fingerprint, error)
            return
        with self._lock:
            self._layouts[fingerprint] = writer

    def _entries(self) -> Iterator[dict[str, str]]:
        """The entries, some at a time: what each has at its name, nothing where it is free."""
        for first in range(0, MOST_ENTRIES, BATCH):
            names = [f"{self.base}/layout/{n:03}" for n in range(first, first + BATCH)]
            yield dict(zip(names, self._texts(names), strict=True))

    def _texts(self, names: Sequence[str]) -> list[str]:
        return [_text(data) for data in whole_objects(self._client, names, _DIGITS)]


def _fingerprint(manifest: bytes) -> str:
    return blake2b(manifest, digest_size=32).hexdigest()


def _text(data: Bytes | None) -> str:
    """A fingerprint; nothing where there is none."""
    text = b"" if data is None else data.tobytes()
    return text.decode() if len(text) == _DIGITS and text.isalnum() else ""
