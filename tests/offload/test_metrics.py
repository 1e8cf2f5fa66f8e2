"""Numbers of tiers, as Prometheus sees them."""

from pathlib import Path

from kvstow.observe import Telemetry
from kvstow.offload.store import Store
from kvstow.transfer.metrics import TransferMetrics
from offloading import hybrid

MIB = 1 << 20


def test_a_tier_that_is_closed_leaves_the_other_numbers_of_a_telemetry(tmp_path: Path):
    telemetry = Telemetry()
    TransferMetrics(telemetry.registry).leases.inc()
    store = Store(host=MIB, disk=tmp_path, disk_bytes=MIB).bind(hybrid())
    store.watch(telemetry)
    assert b'kvstow_tier_rows{tier="disk"}' in telemetry.exposition()
    store.close()
    assert b'{tier="disk"}' not in telemetry.exposition()
    assert b"kvstow_transfer_leases 1.0" in telemetry.exposition()
