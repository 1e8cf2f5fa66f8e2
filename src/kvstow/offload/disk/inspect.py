"""What a store holds: `survey` looks without changing anything, `verify` reads every row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstow.offload.disk.files import aligned, store_errors
from kvstow.offload.disk.opening import FORMAT, capacity_in, stored_layout
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.disk.tree import RowFile, left_over, walk
from kvstow.offload.tier import Verified, select
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import fingerprint
from kvstow.plan.view import align_up

BATCH_BYTES = 64 << 20


def verify(tier: DiskTier, progress: Callable[[int], None] = lambda rows: None) -> Verified:
    """Read every row; those that are damaged are dropped, as on any load."""
    rows = nbytes = 0
    damaged: list[dict[str, Any]] = []
    files = tier.row_files()
    for group in range(len(tier.layout.groups)):
        row_bytes = tier.layout.row_bytes(group)
        step = align_up(row_bytes, 4096)
        count = max(1, BATCH_BYTES // step)
        memory = aligned(count * step)
        into = [memory[i * step : i * step + row_bytes] for i in range(count)]
        keys = [key for file in files if file.group == group for key in file.keys]
        for lo in range(0, len(keys), count):
            part = keys[lo : lo + count]
            whole = tier.load(group, part, into[: len(part)])
            damaged += [{"group": group, "key": key.hex()} for key in select(part, ~whole)]
            rows += len(part)
            nbytes += len(part) * row_bytes
            progress(len(part))
    return Verified(rows, nbytes, tuple(damaged))


def survey(path: Path) -> dict[str, Any]:
    """What a store holds and who writes to it, as plain values."""
    layout = stored_layout(path)
    name = fingerprint(layout)
    with store_errors(path):
        files = walk(f"{path}/rows-{name[:16]}")
        return {
            "path": str(path),
            "model": layout.model,
            "order": layout.order,
            "tp": list(layout.tp),
            "pp": list(layout.pp),
            "fingerprint": name,
            "format": FORMAT,
            "capacity": capacity_in(path),
            "data_bytes": sum(file.nbytes for file in files),
            "rows": sum(len(file.names) for file in files),
            "groups": [_group(files, layout, g) for g in range(len(layout.groups))],
            "writers": [_writer(folder) for folder in sorted(path.glob("new/*"))],
        }


def _group(files: list[RowFile], layout: Layout, group: int) -> dict[str, Any]:
    ours = [file for file in files if file.group == group]
    used = [file.used / 1e9 for file in ours]
    rows = sum(len(file.names) for file in ours)
    return {
        "name": layout.groups[group].group.name,
        "block_tokens": layout.groups[group].group.block_tokens,
        "row_bytes": layout.row_bytes(group),
        "rows": rows,
        "files": len(ours),
        "bytes": rows * layout.row_bytes(group),
        "oldest_use": min(used, default=None),
        "newest_use": max(used, default=None),
    }


def _writer(folder: Path) -> dict[str, Any]:
    with left_over(str(folder)) as is_left:
        return {"pid": int(folder.name.partition("-")[0]), "alive": not is_left}
