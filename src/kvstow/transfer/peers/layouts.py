"""Layouts of peers: decoded and compared once for each manifest, however often it is sent."""

from hashlib import blake2b
from typing import NamedTuple

from kvstow.errors import ManifestError, RouteError
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import decode, fingerprint
from kvstow.route.compare import differences

MOST_REMEMBERED = 256


class PeerLayout(NamedTuple):
    """A peer's layout, which fits ours."""

    layout: Layout
    fingerprint: str


class PeerLayouts:
    """What is known of manifests, by their hash: a hello costs a decoding only if it is the first
    with its manifest."""

    def __init__(self, mine: Layout) -> None:
        self._mine = mine
        self._known: dict[tuple[bytes, bool], PeerLayout | tuple[str, ...]] = {}

    def source(self, manifest: bytes) -> PeerLayout:
        """The layout of an agent that we read from. RouteError where it is none or does not fit."""
        return self._checked(manifest, is_source=True)

    def target(self, manifest: bytes) -> PeerLayout:
        """The layout of an agent that reads from us. RouteError as for a source."""
        return self._checked(manifest, is_source=False)

    def _checked(self, manifest: bytes, *, is_source: bool) -> PeerLayout:
        key = blake2b(manifest, digest_size=32).digest(), is_source
        if key not in self._known:
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            self._known[key] = self._compared(manifest, is_source=is_source)
        known = self._known[key]
        if not isinstance(known, PeerLayout):
            raise RouteError(known)
        return known

    def _compared(self, manifest: bytes, *, is_source: bool) -> PeerLayout | tuple[str, ...]:
        try:
            layout = decode(manifest)
        except ManifestError as error:
            return tuple(str(error).splitlines())
        pair = (layout, self._mine) if is_source else (self._mine, layout)
        return differences(*pair) or PeerLayout(layout, fingerprint(layout))
