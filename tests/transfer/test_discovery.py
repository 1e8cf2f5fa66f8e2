"""Where agents are: lists, DNS, and a real etcd."""

import socket
import time
from pathlib import Path

import pytest

from etcd_server import etcd, free_port
from kvstow.errors import TransferError
from kvstow.transfer.discovery import EtcdLease, found_agents
from waiting import wait_for

A, B = "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"


def test_a_list_is_what_it_says():
    assert found_agents(f"{B}, {A},{B},") == (A, B)
    assert found_agents("") == ()


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch):
    assert "tcp://127.0.0.1:7001" in found_agents("dns://localhost:7001")

    def two(host: str, port: int, **more: object) -> list[object]:
        assert host == "agents.kv.svc"
        return [(0, 0, 0, "", ("10.0.0.2", port)), (0, 0, 0, "", ("fd00::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    assert found_agents("dns://agents.kv.svc:7") == ("tcp://10.0.0.2:7", "tcp://[fd00::1]:7")


@pytest.mark.parametrize(
    "source",
    ["nonsense", "tcp://", "dns://name", "dns://:7", "etcd://host", "http://a:1", "dns://a:x"],
)
def test_what_is_no_source_is_refused_with_a_hint(source: str):
    with pytest.raises(TransferError, match="hint: "):
        found_agents(source)


def test_a_name_that_does_not_exist_and_an_etcd_that_is_not_there_are_errors():
    with pytest.raises(TransferError, match="no-such-name"):
        found_agents("dns://no-such-name.invalid:7")
    with pytest.raises(TransferError, match="etcd://127"):
        found_agents(f"etcd://127.0.0.1:{free_port()}/x/")


def test_leases_in_etcd_are_found_below_their_prefix_and_end_with_their_owners(tmp_path: Path):
    port = free_port()
    source = f"etcd://127.0.0.1:{port}/kvstow/"
    with etcd(tmp_path / "data", port):
        assert found_agents(source) == ()
        with EtcdLease(source, "b", B), EtcdLease(f"etcd://127.0.0.1:{port}/other/", "c", A):
            first = EtcdLease(source, "a", A, seconds=1)
            assert found_agents(source) == (A, B)
            assert found_agents(f"etcd://127.0.0.1:{port}/") == (A, B)
            time.sleep(2.5)  # beyond its lease: it was renewed
            assert found_agents(source) == (A, B)
            first.close()
            first.close()
            assert found_agents(source) == (B,)
            abandoned = EtcdLease(source, "a", A, seconds=1)
            abandoned._closing.set()  # pyright: ignore[reportPrivateUsage] # as if its process had died
            wait_for(lambda: found_agents(source) == (B,))
        assert found_agents(source) == ()


def test_an_address_comes_back_after_etcd_was_away_and_has_lost_everything(tmp_path: Path, caplog):
    port = free_port()
    source = f"etcd://127.0.0.1:{port}/kvstow/"
    with etcd(tmp_path / "first", port):
        lease = EtcdLease(source, "a", A, seconds=1)
    wait_for(lambda: source in caplog.text)
    with etcd(tmp_path / "second", port):
        wait_for(lambda: found_agents(source) == (A,))
        lease.close()
        assert found_agents(source) == ()


def test_values_that_are_no_addresses_are_refused(tmp_path: Path):
    port = free_port()
    source = f"etcd://127.0.0.1:{port}/kvstow/"
    with pytest.raises(TransferError, match="address"):
        EtcdLease(source, "a", "nonsense")
