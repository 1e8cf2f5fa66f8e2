"""Where agents are: lists, and names in DNS."""

import socket

import pytest

from kvstow.errors import TransferError
from kvstow.transfer.channel.address import check_source, find_agents

A, B = "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"


def test_a_list_is_what_it_says():
    assert find_agents(f"{B}, {A},{B},") == (A, B)
    assert find_agents("") == ()


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch):
    assert "tcp://127.0.0.1:7001" in find_agents("dns://localhost:7001")

    def two(host: str, port: int, **more: object) -> list[object]:
        assert host == "agents.kv.svc"
        return [(0, 0, 0, "", ("10.0.0.2", port)), (0, 0, 0, "", ("fd00::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    assert find_agents("dns://agents.kv.svc:7") == ("tcp://10.0.0.2:7", "tcp://[fd00::1]:7")


@pytest.mark.parametrize(
    "source",
    ["nonsense", "tcp://", "dns://name", "dns://:7", "etcd://host:1/x", "http://a:1", "dns://a:x"],
)
def test_what_is_no_source_is_refused_with_a_hint(source: str):
    with pytest.raises(TransferError, match="hint: "):
        find_agents(source)
    with pytest.raises(TransferError, match="hint: "):
        check_source(source)


def test_a_name_that_does_not_exist_is_an_error():
    with pytest.raises(TransferError, match="no-such-name"):
        find_agents("dns://no-such-name.invalid:7")
    check_source("dns://no-such-name.invalid:7")
