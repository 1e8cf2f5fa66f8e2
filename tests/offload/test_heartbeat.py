"""What processes tell of their tiers, as `kvstow top` reads it from the store on disk."""

from pathlib import Path

import numpy as np
import pytest

from kvstow.errors import StoreError
from kvstow.observe import Telemetry, TransferMetrics
from kvstow.offload.disk.inspect import survey
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.heartbeat import Heartbeat
from kvstow.offload.host.tier import HostTier
from kvstow.offload.store import Store
from kvstow.offload.tier import Counts, Usage
from kvstow.testing.servers import Valkey
from offloading import hybrid, key, random_rows
from waiting import wait_for

MIB = 1 << 20


def told(path: Path) -> dict[str, dict[str, int]]:
    """What the one process that has a store open has told of its tiers."""
    (owner,) = survey(path)["owners"]
    return {tier["tier"]: tier for tier in owner["tiers"]}


def room(layout, count: int = 1):
    return [np.zeros(layout.row_bytes(0), np.uint8) for _ in range(count)]


class Watched:
    """A tier that does nothing, and counts how often it was looked at."""

    name = "beside"

    def __init__(self) -> None:
        self.looks = 0
        self.hits = 0

    @property
    def counts(self) -> Counts:
        self.looks += 1
        return Counts(hits=self.hits)

    @property
    def usage(self) -> Usage:
        return Usage(rows=1, nbytes=2, capacity=3)


def test_hits_in_host_memory_are_told_though_nobody_uses_the_disk(tmp_path: Path):
    layout = hybrid()
    with Store(host=MIB, disk=tmp_path, disk_bytes=MIB).bind(layout) as store:
        assert store.host is not None
        rows = random_rows(layout.row_bytes(0), 3, 1)
        assert store.host.store(0, [key(0, i) for i in range(3)], rows).all()
        assert store.host.load(0, [key(0, 0), b"none"], room(layout, 2)).sum() == 1
        wait_for(lambda: told(tmp_path).get("host", {}).get("hits") == 1)
        host, disk = told(tmp_path)["host"], told(tmp_path)["disk"]
        assert (host["misses"], host["rows"], host["stored_rows"]) == (1, 3, 3)
        assert (disk["hits"], disk["stored_rows"]) == (0, 0)


def test_the_last_loads_of_a_burst_are_told_too(tmp_path: Path):
    """A disk tier tells once a second while it is used: what comes right after waits for more."""
    layout = hybrid()
    with Store(disk=tmp_path, disk_bytes=MIB).bind(layout) as store:
        assert store.disk is not None
        for _ in range(20):
            store.disk.load(0, [b"none"], room(layout))
        wait_for(lambda: told(tmp_path).get("disk", {}).get("misses") == 20)


def test_a_remote_tier_is_told_beside_the_others(tmp_path: Path):
    layout = hybrid()
    with (
        Valkey(tmp_path / "valkey") as server,
        Store(host=MIB, disk=tmp_path / "kv", disk_bytes=MIB, remote=server.url) as store,
    ):
        store.bind(layout)
        assert store.remote is not None
        rows = random_rows(layout.row_bytes(0), 2, 1)
        store.remote.store(0, [key(0, i) for i in range(2)], rows)
        wait_for(lambda: told(tmp_path / "kv").get("remote", {}).get("stored_rows") == 2)
        assert list(told(tmp_path / "kv")) == ["host", "remote", "disk"]


def test_nothing_is_written_while_all_tiers_are_idle(tmp_path: Path):
    disk, beside = DiskTier(tmp_path, hybrid(), capacity=MIB), Watched()
    heartbeat = Heartbeat(disk, (beside, None), seconds=0.001)
    beside.hits = 1
    wait_for(lambda: told(tmp_path).get("beside", {}).get("hits") == 1)
    (before,) = survey(tmp_path)["owners"]
    looks = beside.looks
    wait_for(lambda: beside.looks > looks + 10)
    assert survey(tmp_path)["owners"] == [before]
    beside.hits = 2
    wait_for(lambda: told(tmp_path)["beside"]["hits"] == 2)
    heartbeat.close()
    disk.close()


def test_what_could_not_be_written_is_told_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = DiskTier(tmp_path, hybrid(), capacity=MIB)
    host = HostTier(disk.layout, capacity=MIB)
    failed: list[None] = []
    beat = disk.beat

    def fail_twice() -> None:
        if len(failed) < 2:
            failed.append(None)
            raise StoreError("no space left")
        beat()

    monkeypatch.setattr(disk, "beat", fail_twice)
    heartbeat = Heartbeat(disk, (host,), seconds=0.001)
    host.load(0, [b"none"], room(disk.layout))
    wait_for(lambda: told(tmp_path).get("host", {}).get("misses") == 1)
    assert len(failed) == 2
    heartbeat.close()
    host.close()
    disk.close()


def test_a_tier_that_is_closed_leaves_the_other_numbers_of_a_telemetry(tmp_path: Path):
    telemetry = Telemetry()
    TransferMetrics(telemetry.registry).leases.inc()
    store = Store(host=MIB, disk=tmp_path, disk_bytes=MIB).bind(hybrid())
    store.watch(telemetry)
    assert b'kvstow_tier_rows{tier="disk"}' in telemetry.exposition()
    store.close()
    assert b'{tier="disk"}' not in telemetry.exposition()
    assert b"kvstow_transfer_leases 1.0" in telemetry.exposition()
