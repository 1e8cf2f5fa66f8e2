"""A DNS server and two agents behind one name, in a network of their own.

    unshare -rmn python tests/dns_name.py DIRECTORY COMMAND…

Runs the command there, with /etc/resolv.conf naming the server: the system's own resolver asks it.
"""

import socket
import subprocess
import sys
import threading
from ipaddress import ip_address
from pathlib import Path

NAME, PORT = "agents.kv.test", 7000
HOSTS = "127.0.0.2", "127.0.0.3"

A, AAAA = 1, 28
NO_ERROR, NO_SUCH_NAME = 0x8180, 0x8183


def answer(query: bytes) -> bytes:
    """A DNS answer: the addresses of NAME, nothing for anybody else."""
    end = query.index(b"\0", 12) + 1
    labels, rest = [], query[12 : end - 1]
    while rest:
        labels.append(rest[1 : 1 + rest[0]].decode().lower())
        rest = rest[1 + rest[0] :]
    kind = int.from_bytes(query[end : end + 2], "big")
    is_known = ".".join(labels) == NAME
    wanted = {A: 4, AAAA: 6}.get(kind)
    found = [ip_address(host) for host in HOSTS if is_known]
    records = [each.packed for each in found if each.version == wanted]
    flags = NO_ERROR if is_known else NO_SUCH_NAME
    counts = b"".join(n.to_bytes(2, "big") for n in (flags, 1, len(records), 0, 0))
    head = b"\xc0\x0c" + kind.to_bytes(2, "big") + (1).to_bytes(2, "big") + (60).to_bytes(4, "big")
    body = b"".join(head + len(each).to_bytes(2, "big") + each for each in records)
    return query[:2] + counts + query[12 : end + 4] + body


def serve(server: socket.socket) -> None:
    while True:
        query, client = server.recvfrom(512)
        server.sendto(answer(query), client)


def main(directory: Path, command: list[str]) -> int:
    from kvstow.plan.manifest import encode
    from kvstow.transfer.transport.local import Fabric
    from transfer_node import Node, hybrid_layout

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    config = directory / "resolv.conf"
    config.write_text("nameserver 127.0.0.1\n")
    subprocess.run(["mount", "--bind", str(config), "/etc/resolv.conf"], check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 53))
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        fabric, manifest = Fabric(), encode(hybrid_layout())
        nodes = [
            Node(manifest, fabric, name=f"agent-{host}", listen=f"tcp://{host}:{PORT}")
            for host in HOSTS
        ]
        done = subprocess.run(command, check=False, timeout=120)
        for node in nodes:
            node.close()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
