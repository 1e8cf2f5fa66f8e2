"""Two processes over NIXL: the one that is read from is stopped, and goes on later.

    late_bytes.py disconnect|close

prints whether the read that was given up has ended, and how many bytes of it landed later.
"""

import os
import signal
import sys
import time

import numpy as np

from kvstow.errors import TransferError
from kvstow.route.copies import Copies
from kvstow.transfer.transport.base import Kinds, Region
from kvstow.transfer.transport.nixl import NixlTransport

BYTES = 64 << 20


def serve(reader: int, told: int) -> None:
    memory = np.full(BYTES, 9, np.uint8)
    engine = NixlTransport()
    engine.register(Region(memory.ctypes.data, BYTES))
    with open(told, "w") as out:
        print(engine.name, memory.ctypes.data, engine.metadata().hex(), file=out)
    while os.getppid() == reader:
        engine.progress()


def started() -> tuple[int, str, int, bytes]:
    """The process that is read from: its id, and its engine's name, memory and metadata.

    Forked before there is an engine, so that nothing is imported twice."""
    reader = os.getpid()
    told, tell = os.pipe()
    source = os.fork()
    if source == 0:
        serve(reader, tell)
        os._exit(0)
    os.close(tell)
    with open(told) as said:
        name, address, metadata = said.readline().split()
    return source, name, int(address), bytes.fromhex(metadata)


def read(then: str) -> None:
    source, name, address, metadata = started()
    memory = np.zeros(BYTES, np.uint8)
    engine = NixlTransport()
    engine.register(Region(memory.ctypes.data, BYTES))
    engine.connect(name, metadata)
    warm = engine.prepare("read", name, Kinds(), Copies.one(address, memory.ctypes.data, 64))
    warm.start()
    while not warm.poll():
        pass
    memory[:] = 0
    post = engine.prepare("read", name, Kinds(), Copies.one(address, memory.ctypes.data, BYTES))
    os.kill(source, signal.SIGSTOP)
    os.waitid(os.P_PID, source, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    post.start()
    for _ in range(100):
        post.poll()
    engine.disconnect(name)
    if then == "close":
        engine.close()
    ended = post.ended
    memory[:] = 1
    os.kill(source, signal.SIGCONT)
    limit = time.monotonic() + 1.5
    while time.monotonic() < limit:
        try:
            engine.progress()
        except TransferError:
            time.sleep(0.01)
    print(ended, int((memory != 1).sum()), flush=True)
    os.kill(source, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    read(sys.argv[1])
