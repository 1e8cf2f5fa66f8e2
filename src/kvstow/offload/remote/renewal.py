"""Rows that are there already, kept from a collector that is about to remove them.

A writer that finds its row in the store says that it is stored. A collector may have listed the row
while it was old, and S3 cannot remove an object only if it is still the one that was listed. So:

    collector   leaves a mark → lists rows → removes old ones → takes its mark away
    writer      finds rows, writes old ones again → looks for the mark → looks for the rows again

A writer that finds its rows and no mark is safe: a collector that removed something has ended, and
those to come find the rows young. While a collector is at work, rows that are there are not
promised: they count as dropped (`collecting`) and are stored another time. One collector works at a
time.
"""

import time
from collections.abc import Mapping, Sequence
from secrets import token_bytes
from typing import Self

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.remote.clients.base import THERE, Blob, Listing

COLLECTING = "collecting"
"""The name of the mark; and why a row was not promised."""

RENEW_SECONDS = 240.0
"""Rows that are older are written again by a writer that has them at hand."""

MARK_SECONDS = 3600.0
"""A mark that is older was left by a collector that died."""

KEEP_SECONDS = 600.0
"""A collector that works longer renews its mark."""


class AnotherCollector(StoreError):
    """Another collector is at work on the same store."""


class CollectorMark:
    """A collector's mark, while it is at work. Entering raises AnotherCollector where one is."""

    def __init__(self, client: Listing) -> None:
        self._client = client
        self._blob = Blob(COLLECTING, np.frombuffer(token_bytes(16), np.uint8))
        self._kept = 0.0

    def __enter__(self) -> Self:
        (age,) = self._client.ages([COLLECTING])
        if age is not None and age < MARK_SECONDS:
            raise self._another(age)
        if age is not None:
            self._client.delete([COLLECTING])
        reason = self._client.put([self._blob]).get(COLLECTING, THERE)
        if reason != THERE:
            raise StoreError(f"{self._client.where}: {reason} for the mark of a collector")
        if not self._is_mine():
            raise self._another(0.0)
        self._kept = time.monotonic()
        return self

    def _another(self, seconds: float) -> AnotherCollector:
        return AnotherCollector(
            f"{self._client.where}: another collector has been at work for {seconds:.0f} s\n\n"
            f"hint: the mark of one that died counts for {MARK_SECONDS / 60:.0f} minutes"
        )

    def _is_mine(self) -> bool:
        (found,) = self._client.get([COLLECTING], self._blob.data.nbytes)
        return found is not None and found.tobytes() == self._blob.data.tobytes()

    def keep(self) -> None:
        """Renew the mark where it is getting old. Call it again and again."""
        if time.monotonic() - self._kept > KEEP_SECONDS:
            self._client.renew([self._blob])
            self._kept = time.monotonic()

    def __exit__(self, *error: object) -> None:
        if self._is_mine():
            self._client.delete([COLLECTING])


def promised(client: Listing, blobs: Sequence[Blob], ages: Mapping[str, float]) -> set[str]:
    """Of objects that were found, the names of those that no collector removes for a while. Old
    ones are written again."""
    old = [blob for blob in blobs if ages[blob.name] > RENEW_SECONDS]
    refused = client.renew(old) if old else {}
    names = [blob.name for blob in blobs if blob.name not in refused]
    (mark,) = client.ages([COLLECTING])
    if not names or (mark is not None and mark < MARK_SECONDS):
        return set()
    there: list[bool] = client.exists(names).tolist()
    return {name for name, is_there in zip(names, there, strict=True) if is_there}
