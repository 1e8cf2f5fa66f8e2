"""Which processes have a store open, and whether they still live."""

import os
from pathlib import Path

from kvstow.offload.disk.index import FREE, StoreIndex, Transaction

SILENT_SECONDS = 120.0
"""An owner that cannot be looked up (on another machine, in another container) and has not
written for so long counts as dead. If it was not, its leases are gone when it comes to enter
its rows, and it enters none; it is an owner again when it next beats."""


class Processes:
    """The processes of this machine. A simulation gives a store its own."""

    def me(self) -> tuple[int, int, str]:
        """This process: its id, when it started, and where that means something."""
        return os.getpid(), start_time(os.getpid()), this_host()

    def lives(self, pid: int, started: int, host: str, silent_seconds: float) -> bool:
        """Whether the process that wrote these facts, so long ago, is still there."""
        if host == this_host() and host != "unknown":
            return start_time(pid) == started
        return abs(silent_seconds) < SILENT_SECONDS  # a clock was set back where it is below 0


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


def register(write: Transaction, processes: Processes) -> int:
    """Enter this process among the owners; its number."""
    write.tell(
        "INSERT INTO owners (pid, started, host, beat) VALUES (?, ?, ?, ?)",
        *processes.me(),
        write.now(),
    )
    return write.ask("SELECT last_insert_rowid()")[0][0]


def beat(write: Transaction, owner: int, processes: Processes, counts: str) -> None:
    """Say that the owner, this process, lives, and what it has done. Somebody may have taken it
    for dead meanwhile."""
    write.tell(
        "INSERT INTO owners VALUES (?1, ?2, ?3, ?4, ?5, ?6) "
        "ON CONFLICT (id) DO UPDATE SET beat = ?5, counts = ?6",
        owner,
        *processes.me(),
        write.now(),
        counts,
    )


def remove_dead(write: Transaction, processes: Processes) -> None:
    """Remove dead owners, and free the slots that they were writing, those included that one has
    leased after it was taken for dead."""
    for owner in _dead(write, processes):
        remove(write, owner)
    write.tell(
        "UPDATE slots SET owner = ? WHERE owner > 0 AND owner NOT IN (SELECT id FROM owners)", FREE
    )


def remove(write: Transaction, owner: int) -> None:
    """Remove an owner, and free the slots that it was writing."""
    write.tell("UPDATE slots SET owner = ? WHERE owner = ?", FREE, owner)
    write.tell("DELETE FROM owners WHERE id = ?", owner)


def any_died(index: StoreIndex, processes: Processes) -> bool:
    """Whether some owner did not close the store."""
    return bool(_dead(index, processes))


def _dead(index: StoreIndex | Transaction, processes: Processes) -> list[int]:
    owners = index.ask(
        "SELECT id, CAST(pid AS INT), CAST(started AS INT), CAST(host AS TEXT), CAST(beat AS REAL) "
        "FROM owners"
    )
    return [
        owner
        for owner, pid, started, host, last in owners
        if not processes.lives(pid, started, host, index.now() - last)
    ]
