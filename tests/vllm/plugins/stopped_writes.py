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
    from kvstow.transfer import serve

    move_copies = serve.move_copies

    def stopping(*args: Any, **options: Any) -> Any:
        *before, copies = args
        half = len(copies) // 2
        if half:
            yield from move_copies(*before, copies.part(0, half), **options)
        if Path(name).exists():
            os.kill(os.getpid(), signal.SIGSTOP)
        while Path(name).exists():  # the signal alone lets this thread go on for a while
            time.sleep(0.01)
        yield from move_copies(*before, copies.part(half, len(copies)), **options)

    serve.move_copies = stopping
