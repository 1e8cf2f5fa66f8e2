"""Two processes over NIXL: the one that is read from is stopped, and goes on later.

    late_bytes.py reader disconnect|close

prints whether the read that was given up has ended, and how many bytes of it landed later.
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np

from kvstow.errors import TransferError
from kvstow.route.copies import Copies
from kvstow.transfer.transport.base import Kinds, Region
from kvstow.transfer.transport.nixl import NixlTransport

BYTES = 64 << 20


def serve() -> None:
    memory = np.full(BYTES, 9, np.uint8)
    engine = NixlTransport()
    engine.register(Region(memory.ctypes.data, BYTES))
    print(engine.name, memory.ctypes.data, engine.metadata().hex(), flush=True)
    while os.getppid() != 1:
        engine.progress()


def read(then: str) -> None:
    source = subprocess.Popen(
        [sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True
    )
    assert source.stdout is not None
    name, address, metadata = source.stdout.readline().split()
    memory = np.zeros(BYTES, np.uint8)
    engine = NixlTransport()
    engine.register(Region(memory.ctypes.data, BYTES))
    engine.connect(name, bytes.fromhex(metadata))
    warm = engine.prepare("read", name, Kinds(), Copies.one(int(address), memory.ctypes.data, 64))
    warm.start()
    while not warm.poll():
        pass
    memory[:] = 0
    post = engine.prepare(
        "read", name, Kinds(), Copies.one(int(address), memory.ctypes.data, BYTES)
    )
    source.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, source.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    post.start()
    for _ in range(100):
        post.poll()
    engine.disconnect(name)
    if then == "close":
        engine.close()
    ended = post.ended
    memory[:] = 1
    source.send_signal(signal.SIGCONT)
    limit = time.monotonic() + 1.5
    while time.monotonic() < limit:
        try:
            engine.progress()
        except TransferError:
            time.sleep(0.01)
    print(ended, int((memory != 1).sum()), flush=True)
    source.kill()
    os._exit(0)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else read(sys.argv[2])
