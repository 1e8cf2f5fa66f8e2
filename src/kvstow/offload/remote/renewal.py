"""Rows that are there already, kept from a collector that is about to remove them.

A writer that finds its row in the store says that it is stored. A collector may have listed the row
while it was old, and S3 cannot remove an object only if it is still the one that was listed. So:

    collector   makes its claim → sees no other claim → leaves a mark → lists rows →
                removes old ones → takes its mark away → takes its claim away
    writer      finds rows, writes old ones again → looks for the mark → looks for the rows again

A writer that finds its rows and no mark is safe: a collector that removed something has ended, and
those to come find the rows young. While a collector is at work, rows that are there are not
promised: they count as dropped (`collecting`) and are stored another time.

One collector works at a time. Every claim has a name of its own, so that whoever removes the claim
of a collector that died cannot remove that of another one; of two that claim at the same time, each
of which may see the other, none works. Only the one that works touches the mark.
"""

import time
from collections.abc import Mapping, Sequence
from secrets import token_bytes
from typing import Self

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.remote.clients.base import Blob, Listing

COLLECTING = "collecting"
"""The name of the mark; and why a row was not promised."""

CLAIMS = "collectors"
"""Names of claims begin with this."""

RENEW_SECONDS = 240.0
"""Rows that are older are written again by a writer that has them at hand."""

MARK_SECONDS = 3600.0
"""A claim or mark that is older was left by a collector that died."""

KEEP_SECONDS = 600.0
"""A collector that works longer renews both."""


class AnotherCollector(StoreError):
    """Another collector is at work on the same store."""


class CollectorMark:
    """A collector's claim and mark, while it is at work. Entering raises AnotherCollector where
    one is."""

    def __init__(self, client: Listing) -> None:
        self._client = client
        token = token_bytes(16)
        self._claim = Blob(f"{CLAIMS}/{token.hex()}", np.frombuffer(token, np.uint8))
        self._mark = Blob(COLLECTING, self._claim.data)
        self._kept = 0.0
        self.made_at = 0.0
        """When the claim was made, by the clock of the store, which says how old rows are."""

    def __enter__(self) -> Self:
        self._put(self._claim)
        try:
            self._exclude_others()
            self._client.delete([COLLECTING])  # that of a collector that died
            self._put(self._mark)
        except BaseException:
            self._client.delete([self._claim.name])
            raise
        self._kept = time.monotonic()
        return self

    def _put(self, blob: Blob) -> None:
        if refused := self._client.put([blob]):
            raise StoreError(f"{self._client.where}: {refused[blob.name]} for {blob.name}")

    def _exclude_others(self) -> None:
        """Raise where somebody else has a claim; those of collectors that died are removed."""
        found = {each.name: each.modified for each in self._client.list_blobs(f"{CLAIMS}/")}
        self.made_at = found.pop(self._claim.name, time.time())
        others = list(found)
        if not others:
            return
        ages = [age for age in self._client.ages(others) if age is not None]
        if ages and min(ages) < MARK_SECONDS:
            raise AnotherCollector(
                f"{self._client.where}: another collector has been seen {min(ages):.0f} s ago\n\n"
                f"hint: one that died keeps others out for {MARK_SECONDS / 60:.0f} minutes"
            )
        self._client.delete(others)

    @property
    def _is_claimed(self) -> bool:
        """Whether the claim is still there: who stops for very long counts as dead."""
        return bool(self._client.exists([self._claim.name]).all())

    def keep(self) -> None:
        """Renew claim and mark where they are getting old. Call it again and again. Raises
        AnotherCollector where somebody has taken over."""
        if time.monotonic() - self._kept > KEEP_SECONDS:
            if not self._is_claimed:
                raise AnotherCollector(f"{self._client.where}: another collector has taken over")
            self._client.renew([self._claim, self._mark])
            self._kept = time.monotonic()

    def __exit__(self, *error: object) -> None:
        if self._is_claimed:
            self._client.delete([COLLECTING])
            self._client.delete([self._claim.name])


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
