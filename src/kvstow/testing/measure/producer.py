"""The producer of a measurement: a process that only serves."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from kvstow.errors import KvstowError, TransferError
from kvstow.route.blocks import Blocks
from kvstow.testing.measure.setting import BLOCK_TOKENS, IDENTITY, Setting
from kvstow.testing.measure.timed import TimedNixl
from kvstow.transfer.agent import Agent
from kvstow.transfer.loop import Task
from kvstow.transfer.tickets.owner import Generations
from kvstow.transfer.tickets.ticket import Ticket


class Meter:
    """Processor time of some calls, the engine's share left out."""

    def __init__(self, transport: TimedNixl) -> None:
        self.seconds = 0.0
        self._transport = transport

    def on(self, owner: object, name: str, *, idle_counts: bool = True) -> None:
        """Meter a method; only calls that start a transfer, if idle ones do not count."""
        call: Callable[..., Any] = getattr(owner, name)
        transport = self._transport

        @wraps(call)
        def metered(*args: Any, **kwargs: Any) -> Any:
            inside, starts, busy = transport.seconds, transport.starts, time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                if idle_counts or transport.starts != starts:
                    own = time.thread_time() - busy
                    self.seconds += own - (transport.seconds - inside)

        setattr(owner, name, metered)


def serve(setting: Setting) -> None:
    """Offer rows once per line on stdin; answer with the ticket, with our own processor time
    until then, and with the time in which NIXL has connected."""
    arena = setting.arena()
    arena.bytes.fill_(7)
    transport = TimedNixl()
    owner = Generations(arena.layout)
    with Agent(arena, owner, transport=transport, identity=IDENTITY, name="producer") as agent:
        server, meter = agent.server, Meter(transport)
        meter.on(server, "hear")
        meter.on(Task, "resume", idle_counts=False)
        meter.on(agent, "offer_blocks")
        print(agent.address, flush=True)
        for line in sys.stdin:
            order, awake_seconds = line.split()
            server.stay_awake(float(awake_seconds))
            before = meter.seconds
            blocks = setting.in_order() if order == "in-order" else setting.scattered(seed=1)
            if order == "one":
                blocks = Blocks.first([1])
            ticket = agent.offer_blocks({0: blocks}, len(blocks) * BLOCK_TOKENS)
            print(ticket, before, transport.connecting, flush=True)


class Producer:
    """The child, from here. Ctrl-C in a terminal reaches this process only."""

    def __init__(self, setting: Setting) -> None:
        numbers = [str(number) for number in (setting.rows, setting.layers, setting.piece)]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvstow.testing.measure.producer", *numbers, setting.device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self.address = self._line()
        except BaseException:
            self.kill()
            raise
        self.busy_seconds = 0.0
        self.connecting = 0.0

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline().strip()
        if not line:
            raise TransferError(f"the producer ended with {self._child.wait()}", kind="peer")
        return line

    def offer(self, order: str, awake_seconds: float = 0.0) -> Ticket:
        """A ticket; `busy_seconds` is the producer's own time before it made this one, and
        `connecting` the time in which its NIXL has connected."""
        assert self._child.stdin is not None
        print(order, awake_seconds, file=self._child.stdin, flush=True)
        ticket, busy, connecting = self._line().split()
        self.busy_seconds, self.connecting = float(busy), float(connecting)
        return Ticket.parse(ticket)

    def close(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(30)
        self._child.stdout.close()

    def kill(self) -> None:
        """End the child at once."""
        self._child.kill()
        self.close()


@contextmanager
def producing(setting: Setting) -> Generator[Producer]:
    producer = Producer(setting)
    try:
        yield producer
    except BaseException:
        producer.kill()
        raise
    producer.close()


if __name__ == "__main__":
    logging.getLogger("kvstow").setLevel(logging.ERROR)  # whose bytes these are does not matter
    rows, layers, piece = (int(number) for number in sys.argv[1:4])
    try:
        serve(Setting(rows=rows, layers=layers, piece=piece, device=sys.argv[4]))
    except KvstowError as problem:
        sys.exit(f"producer: {problem}")
