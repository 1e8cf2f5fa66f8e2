"""Layout and capacity of a store's directory, found or made. Nobody is waited for.

    layout.json    the manifest of the rows' layout, with the identity of the computation
    store.json     {"format": 3, "capacity": bytes}

The fingerprint of the layout is in the name of the rows' directory and in the header of every row
file: rows of another layout, put under this one, are not found, or not believed.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from kvstow.errors import ManifestError, StoreError
from kvstow.offload.disk.files import (
    make_directory,
    open_own,
    store_errors,
)
from kvstow.offload.disk.format import file_bytes
from kvstow.offload.disk.tree import Writers, walk
from kvstow.offload.rows import row_layout
from kvstow.offload.tier import log
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import MAX_BYTES, decode, encode
from kvstow.route.compare import differences

FORMAT = 3


def open_directory(
    path: Path, layout: Layout | None, capacity: int | None, writers: Writers
) -> tuple[Layout, int]:
    """The layout of the rows in a directory, and the most bytes that their files may take.

    Both are as the directory states; where it does not, the rows of `layout`, and `capacity`, which
    it states from now on. Refuses rows of another model, element type or computation. What is
    written gets its name last, as rows do (`writers`).
    """
    with store_errors(path):
        stored = stated_layout(path)
    rows = stored if layout is None else row_layout(layout)
    if rows is None:
        raise StoreError(f"{path}: no store there (layout.json is missing)")
    if stored is not None:
        _check_same(path, stored, rows)
    most = _checked_capacity(path, rows, capacity)
    with store_errors(path):
        make_directory(path)  # which looks at it, where it is there
        if stored is None:
            new = _written(writers, encode(rows))
            with suppress(FileExistsError):  # another process was faster
                os.link(new, path / "layout.json")
            os.unlink(new)
            stored = stored_layout(path)
            _check_same(path, stored, rows)
    if capacity is not None and capacity != capacity_in(path):
        try:
            text = json.dumps({"format": FORMAT, "capacity": capacity})
            os.replace(_written(writers, text.encode()), path / "store.json")
        except OSError as error:
            log.warning("store %s: its capacity is not written down: %s", path, error)
    return stored, most


def _written(writers: Writers, data: bytes) -> str:
    """A file with these bytes that is on the medium, and has no name in the store yet."""
    name = writers.next_file()
    with os.fdopen(open_own(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return name


def _check_same(path: Path, stored: Layout, rows: Layout) -> None:
    if stored.identity is None:
        raise StoreError(f"{path}: layout.json does not say which computation makes the rows")
    unlike = differences(stored, rows)
    if unlike:
        raise StoreError(
            f"{path}: the store holds rows of another model or element type:\n"
            + "\n".join(unlike)
            + "\n\nhint: give this layout a directory of its own"
        )


def _checked_capacity(path: Path, layout: Layout, capacity: int | None) -> int:
    """The capacity that is given, else the one stated, else what is there."""
    most = capacity_in(path) if capacity is None else capacity
    if most is None:
        most = sum(file.nbytes for root in path.glob("rows-*") for file in walk(str(root)))
        if not most:
            raise StoreError(
                f"{path}: no store there yet, and no capacity given for a new one\n\n"
                'hint: Store(disk=..., disk_bytes="100GiB"), DiskTier(..., capacity=...)'
            )
    groups = range(len(layout.groups))
    least = max(file_bytes(layout.row_bytes(g), 1) for g in groups)
    if most < least:
        raise StoreError(
            f"{path}: a capacity of {most} bytes is below one row of {least}\n\n"
            f"hint: give at least {len(groups) * 4 * least} bytes"
        )
    return most


def capacity_in(path: Path) -> int | None:
    """The capacity that a directory states; None where it does not."""
    try:
        with store_errors(path), os.fdopen(open_own(path / "store.json", os.O_RDONLY)) as file:
            stated = json.loads(file.read(4096))
        capacity = stated["capacity"] if stated["format"] == FORMAT else None
    except (StoreError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return capacity if type(capacity) is int and capacity > 0 else None


def stated_layout(path: Path) -> Layout | None:
    """The layout that a directory states; None where there is none. Raises OSError."""
    try:
        fd = open_own(path / "layout.json", os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    try:
        return decode(data)
    except ManifestError as error:
        raise StoreError(f"{path}: layout.json cannot be read: {error}") from error


def stored_layout(path: Path) -> Layout:
    """The layout of a store's rows."""
    with store_errors(path):
        layout = stated_layout(path)
    if layout is None:
        raise StoreError(f"{path}: no store there (layout.json is missing)")
    return layout
