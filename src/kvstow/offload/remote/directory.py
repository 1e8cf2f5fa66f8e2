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
_FINGERPRINT = 64


@dataclass(frozen=True, eq=False)
class WriterLayout:
    """A layout that rows were written in, and its fingerprint."""

    layout: Layout
    fingerprint: str
    manifest: bytes = field(repr=False)

    @staticmethod
    def of(layout: Layout) -> "WriterLayout":
        """The rows of an arena's layout, as `row_layout` makes them."""
        rows = row_layout(layout)
        manifest = encode(rows)
        return WriterLayout(rows, blake2b(manifest, digest_size=32).hexdigest(), manifest)

    def objects(self, group: int) -> RowObjects:
        """Row objects of a group."""
        return self._objects[group]

    @cached_property
    def _objects(self) -> tuple[RowObjects, ...]:
        fingerprint = bytes.fromhex(self.fingerprint)
        groups = range(len(self.layout.groups))
        return tuple(RowObjects(self.layout, fingerprint, group) for group in groups)


class Directory:
    """The layouts of one computation's writers, as far as they have been looked at."""

    def __init__(self, client: BlobClient, tenant: str, identity: Identity) -> None:
        self._client = client
        self._identity = identity
        self.base = f"{ROWS}/{tenant}/{identity.digest.hex()[:32]}"
        self._layouts: dict[str, WriterLayout] = {}
        self._refused: set[str] = set()
        self._lock = Lock()

    def row_name(self, fingerprint: str, group: int, key: bytes) -> str:
        """The name of a row object."""
        return f"{self.base}/{fingerprint[:32]}/{group}/{key.hex()}"

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
        for first in range(0, MOST_ENTRIES, BATCH):
            names = [self._entry(i) for i in range(first, first + BATCH)]
            there = whole_objects(self._client, names, _FINGERPRINT)
            if any(_text(entry) == own.fingerprint for entry in there):
                return
            for entry, data in zip(names, there, strict=True):
                if data is not None:
                    continue
                self._make(entry, content)  # somebody else may be faster
                if _text(whole_objects(self._client, [entry], _FINGERPRINT)[0]) == own.fingerprint:
                    return
        log.warning("%s: no free entry for a layout among %d", self._client.where, MOST_ENTRIES)

    def _make(self, name: str, data: Bytes) -> None:
        reason = self._client.put([Blob(name, data)]).get(name, THERE)
        if reason != THERE:
            raise StoreFull(f"{self._client.where}: {name} of {data.nbytes} bytes: {reason}")

    def refresh(self) -> None:
        """Look which layouts there are. Manifests that cannot be used are noted once."""
        fingerprints: list[str] = []
        for first in range(0, MOST_ENTRIES, BATCH):
            names = [self._entry(i) for i in range(first, first + BATCH)]
            entries = [_text(data) for data in whole_objects(self._client, names, _FINGERPRINT)]
            fingerprints += [text for text in entries if text]
            if not any(entries):
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
        manifest = data.tobytes()
        trouble = ""
        try:
            layout = decode(manifest)
            if blake2b(manifest, digest_size=32).hexdigest() != fingerprint:
                trouble = "its bytes are others than its fingerprint says"
            elif layout.identity is None or layout.identity.digest != self._identity.digest:
                trouble = "it is of another computation"
            elif any(len(footprint.strips) != 1 for footprint in layout.footprints):
                trouble = "its rows are not single runs"
            else:
                with self._lock:
                    self._layouts[fingerprint] = WriterLayout(layout, fingerprint, manifest)
                return
        except ManifestError as error:
            trouble = str(error)
        self._refused.add(fingerprint)
        log.warning("%s: manifest %s is not used: %s", self._client.where, fingerprint, trouble)

    def _entry(self, number: int) -> str:
        return f"{self.base}/layout/{number:03}"


def _text(data: Bytes | None) -> str:
    """A fingerprint; nothing where there is none."""
    text = b"" if data is None else data.tobytes()
    return text.decode() if len(text) == _FINGERPRINT and text.isalnum() else ""
