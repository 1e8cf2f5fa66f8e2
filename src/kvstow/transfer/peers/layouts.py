"""Layouts of peers: decoded and compared once for each manifest, however often it is sent."""

from functools import lru_cache
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
    """What is known of manifests: a hello costs a decoding only if it is the first with its one."""

    def __init__(self, own: Layout) -> None:
        self._own = own
        self._compared = lru_cache(MOST_REMEMBERED)(self._compare)

    def source(self, manifest: bytes) -> PeerLayout:
        """The layout of an agent that we read from. RouteError where it is none or does not fit."""
        return _fitting(self._compared(manifest, True))

    def target(self, manifest: bytes) -> PeerLayout:
        """The layout of an agent that reads from us. RouteError as for a source."""
        return _fitting(self._compared(manifest, False))

    def _compare(self, manifest: bytes, is_source: bool) -> PeerLayout | tuple[str, ...]:
        try:
            layout = decode(manifest)
        except ManifestError as error:
            return tuple(str(error).splitlines())
        pair = (layout, self._own) if is_source else (self._own, layout)
        return differences(*pair) or PeerLayout(layout, fingerprint(layout))


def _fitting(layout: PeerLayout | tuple[str, ...]) -> PeerLayout:
    """The layout, or the reasons why there is none as an error."""
    if not isinstance(layout, PeerLayout):
        raise RouteError(layout)
    return layout
