"""What the tiers of a process have done, told to `kvstow top` through the store on disk.

A disk tier writes it down while it is used. Rows that are found in host memory, or come from a
remote store, do not touch the disk, so a thread looks once a second whether counts have changed.
"""

import logging
import threading
from collections.abc import Sequence

from kvstow.errors import StoreError
from kvstow.offload.disk.tier import BEAT_SECONDS, DiskTier
from kvstow.offload.tier import Tier

log = logging.getLogger("kvstow.offload")


class Heartbeat:
    """Tells once a second, in a thread of its own, if any of the tiers has done something.

    Nothing is written while all are idle. Close it before the tiers.
    """

    def __init__(
        self, disk: DiskTier, beside: Sequence[Tier | None], *, seconds: float = BEAT_SECONDS
    ) -> None:
        self._disk = disk
        self._tiers: tuple[Tier, ...] = (disk, *(tier for tier in beside if tier is not None))
        for tier in self._tiers[1:]:
            disk.publish(tier)
        self._told = [tier.counts for tier in self._tiers]
        self._seconds = seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstow-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            counts = [tier.counts for tier in self._tiers]
            if counts == self._told:
                continue
            try:
                self._disk.beat()
                self._told = counts
            except StoreError as error:  # nobody sees the figures; rows are as good as before
                log.debug("store %s: figures not told: %s", self._disk.path, error)

    def close(self) -> None:
        """Tell no more."""
        self._closing.set()
        self._thread.join()
