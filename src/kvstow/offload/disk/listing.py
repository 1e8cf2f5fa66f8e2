"""What has come to a store and gone from it since somebody looked, whoever did it.

Directories are listed when they have changed. A change in the moment of a look may be seen one look
later; whoever relies on it asks `contains`, and loads.
"""

import os
import time

from kvstow.offload.disk.tree import RowTree, keys_in

SETTLED_SECONDS = 2.0
"""A directory that changed so lately is listed again: its time may not show the next change."""


class RowListing:
    """The keys of one group, as of the last look."""

    def __init__(self, tree: RowTree, group: int) -> None:
        self._tree, self._group = tree, group
        self._known: dict[str, tuple[int, frozenset[bytes]]] = {}
        """By directory, when it was changed, and what was in it."""

    def look(self) -> tuple[list[bytes], list[bytes]]:
        """The keys that have come, and those that have gone, since the last look."""
        came: list[bytes] = []
        gone: list[bytes] = []
        directories = {entry.path for entry in self._tree.directories(self._group)}
        for directory in directories | set(self._known):
            before, known = self._known.get(directory, (-1, frozenset[bytes]()))
            changed = _changed(directory)
            if changed == before:
                continue
            keys = frozenset(keys_in(directory))
            came += keys - known
            gone += known - keys
            is_settled = abs(time.time() - changed / 1e9) > SETTLED_SECONDS
            self._known[directory] = changed if is_settled else -1, keys
        return came, gone


def _changed(directory: str) -> int:
    try:
        return os.stat(directory).st_mtime_ns
    except FileNotFoundError:
        return 0
