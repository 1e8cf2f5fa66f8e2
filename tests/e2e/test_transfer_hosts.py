"""Two hosts: network namespaces joined by a cable that can lose packets and be cut."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from kvstow.plan.manifest import encode
from kvstow.transfer.channel.curve import Keys
from transfer_node import hybrid_layout, rows_for
from transfer_process import Process, Remote, Zygote

TOKENS = 300
LAYOUT = hybrid_layout(num_slabs=110)
SOURCE, TARGET = rows_for(LAYOUT, TOKENS, 1), rows_for(LAYOUT, TOKENS, 2)
GROUPS = {rows.group.name for rows in LAYOUT.groups}
OPTIONS = {
    "transfer_seconds": 20.0,
    "contact_seconds": 10.0,
    "heartbeat_seconds": 0.2,
    "drain_seconds": 0.5,
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def why_not() -> str:
    """What keeps this machine from having two hosts; empty if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need iproute2 (ip and tc)"
    name = f"kvstow-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.decode().strip()}"
    return ""


class Hosts:
    """Two namespaces, a cable, an agent on either side that knows the other's key."""

    def __init__(self) -> None:
        self.names = [f"kvstow-{side}-{os.getpid()}" for side in "ab"]
        self.zygotes: list[Zygote] = []
        self.processes: list[Process] = []
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = self.names
        ip(*f"-n {first} link add cable type veth peer name cable netns {second}".split())
        for i, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        pairs = [Keys.fresh(), Keys.fresh()]
        self.producer, self.consumer = (
            self._start(i, [pairs[i].public, pairs[i].secret, [pairs[1 - i].public]])
            for i in range(2)
        )

    def _start(self, i: int, keys: list) -> Remote:
        zygote = Zygote("ip", "netns", "exec", self.names[i])
        self.zygotes.append(zygote)
        process = zygote.process({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "cable"})
        self.processes.append(process)
        return process.node(
            encode(LAYOUT),
            f"host-{i}",
            options=OPTIONS,
            keys=keys,
            listen=f"tcp://10.77.0.{i + 1}:5600",
        )

    def cable(self, state: str) -> None:
        ip("-n", self.names[0], "link", "set", "cable", state)

    def narrow(self) -> None:
        """A cable that drops whatever does not fit its short queue."""
        slow = "qdisc replace dev cable root tbf rate 10mbit burst 2kb limit 4kb"
        subprocess.run(["tc", "-n", self.names[0], *slow.split()], check=True)

    def wide(self) -> int:
        """Undo that; how many packets were dropped meanwhile."""
        where = ["dev", "cable"]
        shown = subprocess.run(
            ["tc", "-n", self.names[0], "-s", "-j", "qdisc", "show", *where],
            check=True,
            capture_output=True,
        )
        subprocess.run(["tc", "-n", self.names[0], "qdisc", "del", *where, "root"], check=True)
        return sum(qdisc["drops"] for qdisc in json.loads(shown.stdout))

    def close(self) -> None:
        for closing in (*self.processes, *self.zygotes):
            closing.close()
        for name in self.names:
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Hosts()
    yield made
    made.close()


def pulled(hosts: Hosts, salt: int, **how: object) -> None:
    hosts.producer.fill(SOURCE, salt)
    hosts.consumer.wipe()
    ticket = hosts.producer.offer(SOURCE, TOKENS)
    result = hosts.consumer.pull([ticket], TARGET, wait=40, digest="always", **how)
    assert "error" not in result, result
    assert hosts.consumer.check(TARGET, 0, TOKENS, salt) == ""


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_request_crosses_two_hosts_under_keys(hosts, direction):
    pulled(hosts, 1, direction=direction)


def test_lost_packets_cost_time_and_no_bytes(hosts):
    hosts.narrow()
    for salt, direction in ((2, "read"), (3, "write")):
        pulled(hosts, salt, direction=direction)
    assert hosts.wide() > 0


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_cut_cable_is_an_error_within_the_deadline_and_heals(hosts, direction):
    pulled(hosts, 4)
    ticket = hosts.producer.offer(SOURCE, TOKENS)
    hosts.cable("down")
    started = time.monotonic()
    number = hosts.consumer.begin_pull([ticket], TARGET, direction=direction, deadline=2.0)
    result = hosts.consumer.end_pull(number, 30)
    assert result["kind"] in ("timeout", "peer"), result
    assert set(result["blocks"]) == GROUPS
    assert time.monotonic() - started < 20
    hosts.cable("up")
    assert hosts.consumer.wait_quiet(number, 60)
    assert hosts.consumer.held() == 0
    pulled(hosts, 5, direction=direction)
