"""What a store holds: `survey` looks without changing anything, `verify` reads every row."""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.disk.files import Files, aligned, check_own, store_errors
from kvstow.offload.disk.format import segment_file, segment_numbers, slot_bytes
from kvstow.offload.disk.index import SLOT_BITS
from kvstow.offload.disk.opening import layout_in
from kvstow.offload.disk.owners import Processes
from kvstow.offload.disk.tier import DiskTier
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import fingerprint
from kvstow.plan.view import align_up

BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Verified:
    """What a full reading of a store found. Damaged rows are dropped when it is over."""

    rows: int
    nbytes: int
    damaged: tuple[tuple[int, bytes], ...]
    """Group and key of every row whose bytes were not what they should have been."""


def verify(tier: DiskTier, progress: Callable[[int], None] = lambda rows: None) -> Verified:
    """Read every row; those that are damaged are dropped, as on any load."""
    rows = nbytes = 0
    damaged: list[tuple[int, bytes]] = []
    for group in range(len(tier.layout.groups)):
        row_bytes = tier.layout.row_bytes(group)
        step = align_up(row_bytes, 4096)
        count = max(1, BATCH_BYTES // step)
        memory = aligned(count * step)
        into = [memory[i * step : i * step + row_bytes] for i in range(count)]
        keys = tier.keys(group)
        for lo in range(0, len(keys), count):
            part = keys[lo : lo + count]
            found = tier.load(group, part, into[: len(part)])
            damaged += [(group, part[i]) for i in np.flatnonzero(~found).tolist()]
            rows += len(part)
            nbytes += len(part) * row_bytes
            progress(len(part))
    return Verified(rows, nbytes, tuple(damaged))


EVENTS = 20
"""Different events that are listed, the latest ones."""


def survey(path: Path) -> dict[str, Any]:
    """What a store holds, who has it open and what it has lost, as plain values."""
    layout = stored_layout(path)
    with _opened(path / "index.db") as ask:
        meta = dict(ask("SELECT name, value FROM meta"))
        return {
            "path": str(path),
            "model": layout.model,
            "order": layout.order,
            "tp": list(layout.tp),
            "pp": list(layout.pp),
            "fingerprint": fingerprint(layout),
            "format": meta.get("format"),
            "capacity": meta.get("capacity"),
            "segment_bytes": meta.get("segment_bytes"),
            "data_bytes": _data_bytes(path),
            "rows": ask("SELECT COUNT(*) FROM rows")[0][0],
            "groups": [_group(ask, layout, g) for g in range(len(layout.groups))],
            "owners": [
                _owner(*row)
                for row in ask("SELECT pid, started, host, beat, counts FROM owners ORDER BY id")
            ],
            "events": _events(ask),
        }


def stored_layout(path: Path) -> Layout:
    """The layout of a store's rows."""
    with store_errors(path):
        layout = layout_in(path)
    if layout is None:
        raise StoreError(f"{path}: no store there (layout.json is missing)")
    return layout


def _data_bytes(path: Path) -> int:
    with store_errors(path):
        return sum(Files().used(segment_file(path, n)) for n in segment_numbers(path))


Ask = Callable[..., Sequence[Any]]


@contextmanager
def _opened(file: Path) -> Generator[Ask]:
    """Questions to an index, which stays as it is. StoreError where it cannot be read."""
    with store_errors(file.parent):
        try:
            check_own(file)
        except FileNotFoundError:
            raise StoreError(f"{file}: missing\n\nhint: opening the store makes it again") from None
    try:
        name = f"file:{quote(os.fsencode(file.absolute()))}?mode=ro"
        with closing(sqlite3.connect(name, uri=True, timeout=10)) as sql:

            def ask(question: str, *values: Any) -> Sequence[Any]:
                return sql.execute(question, values).fetchall()

            yield ask
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise StoreError(
            f"the index cannot be read: {error}\n\n"
            "hint: the next process to open the store makes it again"
        ) from error


def _group(ask: Ask, layout: Layout, group: int) -> dict[str, Any]:
    row_bytes = layout.row_bytes(group)
    rows, oldest, newest = ask(
        "SELECT COUNT(*), MIN(seq), MAX(seq) FROM rows WHERE grp = ?", group
    )[0]
    owners = dict(ask("SELECT MIN(owner, 1), COUNT(*) FROM slots WHERE grp = ? GROUP BY 1", group))
    chained = ask("SELECT COUNT(*) FROM rows WHERE grp = ? AND (block > 0 OR parent <> x'')", group)
    return {
        "name": layout.groups[group].group.name,
        "block_tokens": layout.groups[group].group.block_tokens,
        "row_bytes": row_bytes,
        "slot_bytes": slot_bytes(row_bytes),
        "segments": ask("SELECT COUNT(*) FROM segments WHERE grp = ?", group)[0][0],
        "rows": rows,
        "bytes": rows * row_bytes,
        "chained_rows": chained[0][0],
        "free_slots": owners.get(0, 0),
        "leased_slots": owners.get(1, 0),
        "retired_slots": owners.get(-1, 0),
        "segments_used": len(
            ask(f"SELECT DISTINCT place >> {SLOT_BITS} FROM rows WHERE grp = ?", group)
        ),
        "oldest_use": oldest,
        "newest_use": newest,
    }


def _events(ask: Ask) -> list[dict[str, Any]]:
    """What has happened, newest first. Equal events are one, with a count: `time` is that of the
    last one, `rows` are those of all."""
    return [
        {"time": last, "what": what, "rows": rows, "count": count, "first_time": first}
        for last, what, rows, count, first in ask(
            "SELECT MAX(time), what, SUM(rows), COUNT(*), MIN(time) FROM events "
            "GROUP BY what ORDER BY MAX(rowid) DESC LIMIT ?",
            EVENTS,
        )
    ]


def _owner(pid: int, started: int, host: str, beat: float, counts: str) -> dict[str, Any]:
    alive = Processes().lives(pid, started, host, time.time() - beat)
    try:
        tiers = json.loads(counts)
    except ValueError:
        tiers = []
    return {"pid": pid, "alive": alive, "beat": beat, "tiers": tiers}
