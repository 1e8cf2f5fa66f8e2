"""Rows in memory that the processes of a machine share: the disk tier, in `/dev/shm`.

    /dev/shm/NAME/5be1…/    a store of its own for every kind of row

Ranks that hold the same rows, whatever their place in the deployment, have the same folder. Rows
stay when the last process ends, until they are evicted, `kvstow store prune` drops them, the name
is removed, or the machine restarts.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path

from kvstow.errors import StoreError
from kvstow.offload.disk.files import MemoryFiles, make_directory, store_errors
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.rows import row_layout
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import fingerprint

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")

WINDOW_SHARE = 8
LEAST_WINDOW = 64 << 20


def shared_path(name: str) -> Path:
    """Where the memory of a name is."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise StoreError(
            f"shared memory cannot be called {name!r}\n\n"
            f"hint: up to 200 letters, digits, dots, dashes and underscores"
        )
    return SHARED_MEMORY / name


def shared_folder(name: str, layout: Layout) -> Path:
    """Where rows of this layout are kept under a name: pages and computation decide, not ranks."""
    rows = replace(row_layout(layout), tp=(0, 1), pp=(0, 1))
    return shared_path(name) / fingerprint(rows)[:16]


def split_capacity(nbytes: int) -> tuple[int, int]:
    """Of host memory with a shared tier, the part that a process keeps to itself, through which its
    rows pass, and the part that is shared."""
    window = max(nbytes // WINDOW_SHARE, min(nbytes // 2, LEAST_WINDOW))
    return window, nbytes - window


def shared_tier(name: str, layout: Layout, *, capacity: int) -> DiskTier:
    """The rows of a name for this layout. Nothing is synced: memory outlives no power cut."""
    with store_errors(shared_path(name)):
        make_directory(shared_path(name))  # nobody else's, where everybody may make one
    return DiskTier(
        shared_folder(name, layout),
        layout,
        capacity=capacity,
        files=MemoryFiles(),
        name="host_shared",
    )


def remove(name: str) -> None:
    """Give the memory of a name back. Whoever uses it goes on, and finds nothing there."""
    shutil.rmtree(shared_path(name), ignore_errors=True)
