"""Random aborts, kills, stalls, restarts, expiries between real processes over NIXL.

    scripts/soak [--seconds 120] [--seed N] [--tcp]

Two producers, two consumers, and a third producer that is of another computation at every other
start. Every pull either is accepted, and then every byte is what was offered by the same
computation, or fails with an error that names its blocks, within its deadline. At the end nobody
keeps a row or a lease. Exit code 1, and the seed, if anything else happened.

A refusal by digest has one allowed cause: the producer reused the rows of that very pull, after the
fence had been read and before it counted its own digest. The bytes that the consumer holds are then
the offered ones, all of them, and that is checked. Anything else would mean that the fence let
wrong bytes pass.
"""

import argparse
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from itertools import cycle
from typing import Any

from kvstow.plan.identity import Identity
from kvstow.plan.manifest import encode
from transfer_node import Listed, hybrid_layout, rows_for
from transfer_process import Process, Remote, Zygote

SLABS_EACH = 12
LAYOUT = hybrid_layout(num_slabs=1 + 2 * SLABS_EACH)
MODELS = tuple(
    Identity.of_tensors(name, {}, [("w", "float32", name.encode())]) for name in ("one", "other")
)
MANIFESTS = tuple(encode(LAYOUT.identified(model)) for model in MODELS)
SALTS = 90
REUSED = 99
"""The salt of rows that were reused; the other computation's salts begin behind it."""

OPTIONS = {
    "transfer_seconds": 4.0,
    "contact_seconds": 2.0,
    "heartbeat_seconds": 0.2,
    "drain_seconds": 0.5,
    "lease_seconds": 3.0,
    "quarantine_seconds": 12.0,
}
QUIET_SECONDS = 60.0
DEADLINE = 4.0
SLACK = 15.0
GONE = (AssertionError, OSError, ValueError)


class Wrong(Exception):
    """Something that must not happen."""


class Seat:
    """A place for a process: killed and filled again under the same address, with the next of
    its models."""

    def __init__(self, zygote: Zygote, name: str, env: dict[str, str], *models: int) -> None:
        self.name = name
        self._models = cycle(models or (0,))
        self.lock = threading.RLock()
        self._zygote = zygote
        self._env = env
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.node: Remote
        self.process: Process
        self.killed: set[int] = set()
        self.fill()

    def fill(self) -> None:
        self.process = self._zygote.process(self._env)
        listen = f"tcp://127.0.0.1:{self._port}"
        model = next(self._models)
        made = self.process.node(MANIFESTS[model], self.name, options=OPTIONS, listen=listen)
        made.model = model
        self.node = made

    def kill(self) -> None:
        with self.lock:
            self.killed.add(self.process.pid)
            self.process.kill()
            self.process.close()
            self.fill()

    @property
    def crashed(self) -> bool:
        """Whether its process has ended although nobody killed it."""
        with self.lock:
            try:
                os.kill(self.process.pid, 0)
            except ProcessLookupError:
                return self.process.pid not in self.killed
        return False

    def call(self, what: str, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            node = self.node
        return getattr(node, what)(*args, **kwargs)


class Soak:
    def __init__(self, seconds: float, seed: int, env: dict[str, str]) -> None:
        self.until = time.monotonic() + seconds
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.zygote = Zygote()
        self.producers = [Seat(self.zygote, f"producer-{i}", env) for i in range(2)]
        self.producers.append(Seat(self.zygote, "producer-of-two", env, 1, 0))
        self.consumers = [Seat(self.zygote, f"consumer-{i}", env) for i in range(2)]

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=(self._consume, i, random.Random(seed)))
            for i, seed in enumerate(self.random.sample(range(1 << 30), 2))
        ]
        threads.append(
            threading.Thread(target=self._guarded, args=(self._trouble, random.Random(3)))
        )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.wrong:
            self._guarded(self._at_rest)

    def _guarded(self, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except Exception as error:
            self.wrong.append(f"{work.__name__}{args[:1]}: {type(error).__name__}: {error}")
            self.until = 0

    # ── pulls ─────────────────────────────────────────────────────────────────────

    def _consume(self, i: int, chance: random.Random) -> None:
        seat = self.consumers[i]
        slabs = (1 + i * SLABS_EACH, 1 + (i + 1) * SLABS_EACH)
        salt = 0
        while time.monotonic() < self.until:
            salt += 1
            producer = chance.choice(self.producers)
            tokens = chance.randint(1, 30)
            source = rows_for(LAYOUT, tokens, chance.randrange(1 << 30), slabs)
            target = rows_for(LAYOUT, tokens, chance.randrange(1 << 30), slabs)
            try:
                outcome = self._pull(seat, producer, (source, target), tokens, salt % SALTS, chance)
            except GONE:
                outcome = "process gone"
                time.sleep(0.2)
                for each in (seat, producer):
                    if each.crashed:
                        raise Wrong(f"{each.name} crashed") from None
            self.outcomes[outcome] += 1

    def _pull(
        self,
        seat: Seat,
        producer: Seat,
        rows: tuple[Listed, Listed],
        tokens: int,
        salt: int,
        chance: random.Random,
    ) -> str:
        source, target = rows
        node = seat.node
        node.wipe()
        maker = producer.node
        salt += maker.model * (REUSED + 1)
        maker.reuse(source, salt)
        lease = chance.choice([0.05, 1.0, 10.0])
        ticket = maker.offer(source, tokens, lease_seconds=lease)
        if chance.random() < 0.1:
            time.sleep(0.1)
        started = time.monotonic()
        number = node.begin_pull(
            [ticket],
            target,
            direction=chance.choice(["read", "write", None]),
            deadline=DEADLINE,
            digest=chance.choice(["always", "sample", "off"]),
        )
        trouble = chance.choices(["abort", "reuse", "withdraw", "none"], [1, 1, 1, 7])[0]
        if trouble == "abort":
            node.abort(number)
        elif trouble == "reuse":
            maker.reuse(source, REUSED)
        elif trouble == "withdraw":
            maker.withdraw(ticket)
        result = node.end_pull(number, DEADLINE + SLACK)
        if time.monotonic() - started > DEADLINE + SLACK:
            raise Wrong(f"a pull took {time.monotonic() - started:.1f} s")
        named = set(result.get("blocks", ()))
        if "error" in result and named != {rows.group.name for rows in LAYOUT.groups}:
            raise Wrong(f"{result['kind']} names only {sorted(named)}")
        outcome = result.get("kind", "accepted")
        if maker.model != 0 and outcome in ("accepted", "fence", "digest"):
            raise Wrong(f"rows of another computation were moved: {result}")
        if outcome in ("accepted", "digest"):
            bad = node.check(target, 0, tokens, salt)
            if bad:
                raise Wrong(f"{outcome}, and wrong: {bad}: {result}")
        if outcome == "digest":
            if trouble != "reuse":
                raise Wrong(f"refused by its digest, and nobody had touched its rows: {result}")
            outcome = "digest (reused behind the fence, bytes as offered)"
        if not node.wait_quiet(number, QUIET_SECONDS):
            raise Wrong(f"not quiet after {QUIET_SECONDS} s: {result}")
        return outcome if maker.model == 0 else f"of another computation: {outcome}"

    # ── trouble ───────────────────────────────────────────────────────────────────

    def _trouble(self, chance: random.Random) -> None:
        while time.monotonic() < self.until:
            time.sleep(chance.uniform(0.3, 2.0))
            seat = chance.choice([*self.producers, *self.producers, *self.consumers])
            what = chance.choice(["kill", "stall", "stall", "nothing"])
            self.outcomes[f"({what})"] += 1
            if what == "kill":
                seat.kill()
            elif what == "stall":
                process = seat.process
                process.stop()
                time.sleep(chance.choice([0.05, 0.5, 1.5]))
                process.resume()

    # ── the end ───────────────────────────────────────────────────────────────────

    def _at_rest(self) -> None:
        limit = time.monotonic() + 60
        for seat in (*self.producers, *self.consumers):
            while True:
                held = seat.call("held")
                leases = seat.call("metric", "kvstow_transfer_leases")
                rows = seat.call("metric", "kvstow_transfer_quarantined_rows")
                if not held and not leases and not rows:
                    break
                if time.monotonic() > limit:
                    raise Wrong(
                        f"{seat.name} keeps {held} rows, {leases} leases, {rows} rows in quarantine"
                    )
                time.sleep(0.2)

    def close(self) -> None:
        for seat in (*self.producers, *self.consumers):
            seat.process.close()
        self.zygote.close()


def soak(seconds: float, seed: int, *, tcp: bool) -> tuple[Counter[str], list[str]]:
    """Outcomes, and what went wrong."""
    made = Soak(seconds, seed, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"} if tcp else {})
    try:
        made.run()
        return made.outcomes, made.wrong
    finally:
        made.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--tcp", action="store_true")
    options = parser.parse_args()
    print(f"soak: {options.seconds:g} s, seed {options.seed}", file=sys.stderr)
    outcomes, wrong = soak(options.seconds, options.seed, tcp=options.tcp)
    print(
        json.dumps(
            {"seed": options.seed, "outcomes": dict(outcomes.most_common()), "wrong": wrong},
            indent=1,
        )
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
