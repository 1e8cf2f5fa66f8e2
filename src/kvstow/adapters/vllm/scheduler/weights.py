"""What an engine computes with, while its weights are changed in place.

    started               the checkpoint's identity
    changed               an identity that no other engine has: these may be any weights
    named "run 3, 400"    the checkpoint's and this name: the same in every engine that was told so

A name that something was computed under is not taken a second time: it may be said of other
weights then. Whoever gives one says that it stands for these weights, here and everywhere.
"""

import logging
from dataclasses import replace
from secrets import token_hex

from kvstow.plan.identity import Identity

log = logging.getLogger(__name__)


class EngineWeights:
    """The identity of one engine, from its start through all changes of its weights."""

    def __init__(self, identity: Identity) -> None:
        self._started = self.identity = identity
        self._name: str | None = None
        self._used: set[str] = set()

    @property
    def have_changed(self) -> bool:
        """Whether they may be others than the checkpoint's."""
        return self.identity is not self._started

    def change(self) -> None:
        """They may have become any others."""
        self._name = None
        self.identity = unshared(self._started)

    def name(self, name: str) -> None:
        """They have become those of this name; any others, if it was used before."""
        self.change()
        if name in self._used:
            log.warning(
                "weights %r: something was computed under that name before, so nothing is shared "
                "with other engines\n\nhint: a new name for every change of weights",
                name,
            )
            return
        self._name = name
        self.identity = _with(self._started, "weights", ascii(name))
        log.info("weights are called %r from now on", name)

    def mark_used(self) -> None:
        """The engine computes with them: their name stands for them, and for no others."""
        if self._name is not None:
            self._used.add(self._name)


def unshared(identity: Identity) -> Identity:
    """The same, told apart from what everybody else has."""
    return _with(identity, "reset", token_hex(16))


def _with(identity: Identity, field: str, value: str) -> Identity:
    config = dict(identity.config) | {f"run.{field}": value}
    return replace(identity, config=tuple(sorted(config.items())))
