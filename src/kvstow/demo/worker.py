"""A child process of the demo: `python -m kvstow.demo.worker FD`, spoken to over that pipe."""

import logging
import os
import sys
import threading
import traceback
import warnings
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue

from kvstow.demo.messages import (
    ChildFailed,
    FromChild,
    Load,
    Progress,
    ToChild,
    encode,
    to_child,
)
from kvstow.errors import KvstowError


def main() -> None:
    """Obey until the pipe ends; then end at once, whatever is going on."""
    pipe = Connection(int(sys.argv[1]))
    orders: SimpleQueue[ToChild] = SimpleQueue()

    def listen() -> None:
        while True:
            try:
                orders.put(to_child(pipe.recv_bytes()))
            except (EOFError, OSError):
                os._exit(0)

    def say(message: FromChild) -> None:
        pipe.send_bytes(encode(message))

    threading.Thread(target=listen, daemon=True).start()
    try:
        say(Progress(what="importing torch and transformers"))
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        rooms = import_module("kvstow.demo.engine")
        say(Progress(what="waiting for the weights"))
        load = orders.get()
        assert isinstance(load, Load)
        engine = rooms.DemoEngine(load, say)
        while True:
            engine.obey(orders.get())
    except KvstowError as error:
        say(ChildFailed(error=str(error)))
    except Exception as error:
        say(ChildFailed(error=f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"))
    threading.Event().wait()  # the parent decides when


if __name__ == "__main__":
    main()
