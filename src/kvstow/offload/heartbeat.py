"""What the tiers of a process have done, told to `kvstow top`: in a telemetry, or through a disk.

Whoever has the address of an agent, or of a Prometheus endpoint, reads the telemetry. Whoever has
the directory of a store reads what its disk tier writes down while it is used. Rows that are found
in host memory, or come from a remote store, do not touch the disk, so a thread looks once a second
whether counts have changed.
"""

import logging
import threading
from collections.abc import Sequence
from functools import partial

from kvstow.errors import StoreError
from kvstow.observe import Reasons, Telemetry, TierMetrics
from kvstow.offload.disk.tier import BEAT_SECONDS, DiskTier
from kvstow.offload.remote.tier import RemoteTier
from kvstow.offload.tier import Tier, facts

log = logging.getLogger("kvstow.offload")


def watch_tiers(telemetry: Telemetry, tiers: Sequence[Tier | None]) -> None:
    """Show the numbers of a process's tiers in a telemetry."""
    metrics = TierMetrics(telemetry.registry)
    for tier in tiers:
        if tier is not None:
            metrics.watch(tier.name, partial(facts, tier), partial(_reasons, tier))


def _reasons(tier: Tier) -> Reasons:
    """Why rows were missed or dropped; only remote stores tell."""
    return tier.reasons if isinstance(tier, RemoteTier) else {}


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
