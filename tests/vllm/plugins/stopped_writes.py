"""A plugin for vLLM: a producer stops in the middle of a write, like one that hangs.

`KVSTOW_STOPPED_WRITES` names a file. While it is there, a process that has written half of what a
consumer waits for stops itself. Remove the file when it has; it writes the rest when it goes on.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any


def stop_writes() -> None:
    """Follow the file, if the environment names one. vLLM calls this at its start."""
    name = os.environ.get("KVSTOW_STOPPED_WRITES")
    if name is None:
        return
    from kvstow.transfer.move.gather import Writes

    put = Writes._put

    def stopping(self: Writes, writes: Any, flights: Any) -> Any:
        half = len(writes) // 2
        if half:
            yield from put(self, writes.part(0, half), flights)
        if Path(name).exists():
            os.kill(os.getpid(), signal.SIGSTOP)
        while Path(name).exists():  # the signal alone lets this thread go on for a while
            time.sleep(0.01)
        yield from put(self, writes.part(half, len(writes)), flights)
        return len(writes)

    Writes._put = stopping
