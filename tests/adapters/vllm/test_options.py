"""Options of the connector."""

import json
from dataclasses import replace

import pytest

from kvstow.adapters.vllm.options import ConnectorOptions, rank_address
from kvstow.errors import SpecError
from kvstow.plan.group import grouped
from kvstow.plan.pack import packed
from kvstow.transfer.channel.curve import Keys
from planning import attention

Part = tuple[int, int]


def test_an_option_that_nobody_knows_is_refused():
    with pytest.raises(SpecError, match="'lease'"):
        ConnectorOptions.of({"lease": 3})


def test_an_option_of_another_type_is_refused():
    with pytest.raises(SpecError, match="lease_seconds"):
        ConnectorOptions.of({"lease_seconds": "60"})


def test_sizes_may_be_written_in_words():
    options = {"host_bytes": "8GiB", "disk_bytes": "1.5TiB", "disk_path": "/x"}
    made = ConnectorOptions.of({**options, "store_bytes_per_second": "512MB"})
    assert (made.host_bytes, made.disk_bytes) == (8 << 30, 3 << 39)
    assert made.store_bytes_per_second == 512_000_000
    with pytest.raises(SpecError, match="'host_bytes': '8 pints' is not a size"):
        ConnectorOptions.of({"host_bytes": "8 pints"})


def test_host_memory_may_be_called_as_vllms_connectors_call_it():
    assert ConnectorOptions.of({"cpu_bytes_to_use": "1GiB"}).host_bytes == 1 << 30
    with pytest.raises(SpecError, match="hint: leave the first one out"):
        ConnectorOptions.of({"cpu_bytes_to_use": 1 << 30, "host_bytes": 1 << 20})


@pytest.mark.parametrize(
    ("options", "host", "port", "engines", "listen"),
    [
        ({}, "", "", 1, "tcp://127.0.0.1:*"),
        ({}, "10.0.0.7", "5600", 1, "tcp://10.0.0.7:5600"),
        ({}, "fd00::7", "5600", 1, "tcp://[fd00::7]:5600"),
        ({}, "10.0.0.7", "", 1, "tcp://10.0.0.7:*"),
        ({}, "", "5600", 1, "tcp://127.0.0.1:5600"),
        ({}, "10.0.0.7", "5600", 4, "tcp://10.0.0.7:*"),
        ({"listen": "tcp://127.0.0.1:9"}, "10.0.0.7", "5600", 1, "tcp://127.0.0.1:9"),
    ],
)
def test_the_address_that_is_set_for_vllms_connectors_is_ours_unless_listen_says_another(
    options: dict[str, object], host: str, port: str, engines: int, listen: str
):
    names = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": port}
    environ = {name: value for name, value in names.items() if value}
    made = ConnectorOptions.of(options, environ=environ, num_engines=engines)
    assert made.listen == listen


@pytest.mark.parametrize(
    ("address", "tp", "pp", "found"),
    [
        ("tcp://127.0.0.1:*", (1, 2), (0, 1), "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:5600", (0, 1), (0, 1), "tcp://127.0.0.1:5600"),
        ("tcp://127.0.0.1:5600", (1, 2), (1, 2), "tcp://127.0.0.1:5603"),
        ("tcp://[::1]:5600", (1, 2), (0, 1), "tcp://[::1]:5601"),
        ("ipc:///run/kvstow", (0, 1), (0, 1), "ipc:///run/kvstow"),
    ],
)
def test_ports_of_ranks_count_up(address: str, tp: Part, pp: Part, found: str):
    layout = replace(packed(grouped([attention("l")]), num_slabs=4), tp=tp, pp=pp)
    assert rank_address(address, layout) == found


def test_whole_seconds_are_seconds():
    assert ConnectorOptions.of({"lease_seconds": 3}).lease_seconds == 3


def test_times_and_digests_reach_the_agent():
    times = {"lease_seconds": 3, "transfer_seconds": 4, "contact_seconds": 2.5}
    made = ConnectorOptions.of({**times, "digest": "off"}).agent
    assert {name: getattr(made, name) for name in times} == times
    assert made.digest == "off"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"disk_path": "/tmp/x", "disk_bytes": 1 << 30}, "hint: set host_bytes"),
        ({"lend": "tcp://127.0.0.1:*"}, "hint: set host_bytes"),
        ({"disk_path": "/tmp/x", "host_bytes": 1 << 30}, "a disk tier needs both"),
        ({"host_bytes": -1}, "host_bytes"),
        ({"peers_seconds": 0.0}, "peers_seconds"),
        ({"peers": 7}, "peers"),
        ({"peers": ["nowhere"]}, "peers: "),
        ({"digest": "now and then"}, "digest"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, object], said: str):
    with pytest.raises(SpecError, match=said):
        ConnectorOptions.of(options)


@pytest.mark.parametrize(
    "name", ["num_threads", "enable_cross_layers_blocks", "enforce_handshake_compat"]
)
def test_an_option_of_another_connector_is_refused_with_what_to_write(name: str):
    with pytest.raises(SpecError, match="hint: "):
        ConnectorOptions.of({name: True})


def test_a_keys_file_is_a_pair_and_those_it_lets_in(tmp_path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"public": "a" * 40, "secret": "b" * 40, "peers": ["c" * 40]}))
    keys = ConnectorOptions.of({"keys_file": str(file)}).keys()
    assert keys == Keys(public="a" * 40, secret="b" * 40, peers=frozenset(["c" * 40]))
    assert ConnectorOptions.of({}).keys() is None


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        '{"public": 1}',
        '{"public": "a", "secret": "b", "peers": []}',
        json.dumps({"public": "a" * 40, "secret": "b" * 40, "peers": "c" * 40}),
        json.dumps({"public": "a" * 40, "secret": "b" * 40, "peers": [], "more": 1}),
    ],
)
def test_a_bad_keys_file_is_named_with_what_is_wrong(tmp_path, text):
    file = tmp_path / "keys.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SpecError, match=r"keys\.json: .*\n\nhint: a JSON object"):
        ConnectorOptions.of({"keys_file": str(file)}).keys()
