"""Who has a store open, and whether they still live."""

import os
import time
from pathlib import Path

from kvstow.offload.disk.index import FREE, StoreIndex, Transaction

SILENT_SECONDS = 120.0
"""An owner that cannot be looked up (on another machine, in another container) and has not
written for so long counts as dead. If it was not, its leases are gone when it comes to enter
its rows, and it enters none."""


def this_host() -> str:
    """The boot and the process namespace in which process ids mean something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown"


def start_time(pid: int) -> int:
    """When the process started, in ticks since boot; -1 where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return -1
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def enlist(write: Transaction) -> int:
    """Enter this process among the owners; its number."""
    write.tell(
        "INSERT INTO owners (pid, started, host, beat) VALUES (?, ?, ?, ?)",
        os.getpid(),
        start_time(os.getpid()),
        this_host(),
        time.time(),
    )
    return write.ask("SELECT last_insert_rowid()")[0][0]


def beat(write: Transaction, owner: int, counts: str) -> None:
    """Say that the owner lives, and what it has done."""
    write.tell("UPDATE owners SET beat = ?, counts = ? WHERE id = ?", time.time(), counts, owner)


def lives(pid: int, started: int, host: str, last_beat: float) -> bool:
    """Whether the process that wrote these facts is still there."""
    if host == this_host() and host != "unknown":
        return start_time(pid) == started
    return time.time() - last_beat < SILENT_SECONDS


def bury(write: Transaction) -> tuple[int, int]:
    """Strike out dead owners and free what they were writing; how many, how many slots."""
    owners = write.ask("SELECT id, pid, started, host, beat FROM owners")
    dead = [owner for owner, *facts in owners if not lives(*facts)]
    slots = 0
    for owner in dead:
        slots += write.tell("UPDATE slots SET owner = ? WHERE owner = ?", FREE, owner)
        write.tell("DELETE FROM owners WHERE id = ?", owner)
    return len(dead), slots


def living(index: StoreIndex) -> list[tuple[int, int, str]]:
    """Owners that live: number, process id, counts as JSON."""
    owners = index.ask("SELECT id, pid, started, host, beat, counts FROM owners ORDER BY id")
    return [
        (owner, pid, counts)
        for owner, pid, started, host, last, counts in owners
        if lives(pid, started, host, last)
    ]
