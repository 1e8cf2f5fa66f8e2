"""Which rows are in which tier, told as changes.

Tiers are asked, not listened to: a disk that several processes share loses rows by the eviction
of any of them. New keys are looked for a few times, until every tier has had time to take them
in; after that they are looked at again, a slice at a time. A remote store is asked for new keys
only: its answers cost requests, and every instance finds the same there.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstow.errors import StoreError
from kvstow.offload.tier import Tier
from kvstow.threads import guarded_thread

log = logging.getLogger("kvstow.offload")

SLICE = 2048
"""Known keys that one turn looks at in every tier."""

LOOKS = (0.0, 0.5, 2.0, 8.0, 30.0)
"""New keys are looked for after so many seconds each."""

TURN_SECONDS = 0.25
MOST_KEYS = 1 << 21


@dataclass(frozen=True, slots=True)
class TierChange:
    """Rows of one group that a tier has from now on, or has no longer."""

    tier: str
    group: int
    keys: tuple[bytes, ...]
    stored: bool


@dataclass(slots=True)
class _Seen:
    """In which tiers a key was last seen, and when it was last noted."""

    tiers: set[str]
    since: float


class TierWatch:
    """Keys that were stored or found, looked at again and again. `note` from any thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers, self._clock = tuple(tiers), clock
        self._local = [tier for tier in tiers if tier.name != "remote"]
        self._noted: deque[tuple[int, tuple[bytes, ...]]] = deque()
        self._new: list[tuple[float, int, int, list[bytes]]] = []
        """When keys of a group were noted, how often they have been looked for, group and keys."""
        self._watched: dict[int, OrderedDict[bytes, _Seen]] = {}
        self._changes: deque[TierChange] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, group: int, keys: Iterable[bytes]) -> None:
        """These rows may be in some tier, now or soon."""
        self._noted.append((group, tuple(keys)))

    def take(self) -> list[TierChange]:
        """Changes since the last time, in order."""
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def turn(self) -> None:
        """Look for new keys, and look again at the next known ones."""
        now = self._clock()
        while self._noted:
            group, keys = self._noted.popleft()
            self._learn(group, keys, now)
        new, self._new = self._new, []
        for since, looks, group, keys in new:
            if since + LOOKS[looks] <= now:
                keys, looks = self._look_for(group, keys), looks + 1
            if keys and looks < len(LOOKS):
                self._new.append((since, looks, group, keys))
        for group, watched in self._watched.items():
            self._look(group, list(islice(watched, SLICE)), self._local)
            self._turn_over(watched, now)

    def _learn(self, group: int, keys: Sequence[bytes], now: float) -> None:
        watched = self._watched.setdefault(group, OrderedDict())
        for key in keys:
            if key in watched:
                watched[key].since = now
            elif len(watched) < MOST_KEYS:
                watched[key] = _Seen(set(), now)
        new = [key for key in dict.fromkeys(keys) if key in watched]
        self._new.append((now, 0, group, new))

    def _look_for(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Look for new keys in all tiers; those that some tier lacks, to be looked for again."""
        watched = self._watched[group]
        left = [key for key in keys if key in watched]
        self._look(group, left, self._tiers)
        return [key for key in left if len(watched[key].tiers) < len(self._tiers)]

    def _look(self, group: int, keys: Sequence[bytes], tiers: Sequence[Tier]) -> None:
        watched = self._watched[group]
        for tier in tiers if keys else ():
            changed: dict[bool, list[bytes]] = {False: [], True: []}
            try:
                present: list[bool] = tier.contains(group, keys).tolist()
            except StoreError as error:  # the next look may succeed
                log.debug("tier %s: not looked at: %s", tier.name, error)
                continue
            for key, there in zip(keys, present, strict=True):
                if there != (tier.name in watched[key].tiers):
                    changed[there].append(key)
                    watched[key].tiers.symmetric_difference_update((tier.name,))
            for stored, listed in changed.items():
                if listed:
                    self._changes.append(TierChange(tier.name, group, tuple(listed), stored))

    def _turn_over(self, watched: "OrderedDict[bytes, _Seen]", now: float) -> None:
        """The first keys were looked at: they go to the end, or away if they are nowhere."""
        for key in list(islice(watched, SLICE)):
            watched.move_to_end(key)
            if not watched[key].tiers and now - watched[key].since > LOOKS[-1]:
                del watched[key]

    # ── in the background ─────────────────────────────────────────────────────────

    def start(self) -> None:
        """Turn in a thread, a few times a second."""
        self._thread = guarded_thread("kvstow-watch", self._run, on_broken=lambda _: None)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(TURN_SECONDS):
            self.turn()

    def close(self) -> None:
        """Stop the thread, if there is one; before the tiers are closed."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
