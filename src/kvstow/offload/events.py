"""What an engine made of kvstow's parts has cached, on the device and in tiers, for routers.

    events = EngineEvents(publisher, ledger=ledger, store=store)
    events.know(prompt)        before its blocks are computed or looked up
    events.turn()              now and then, in the thread that owns the ledger

Events call a block by the prompt's 64-bit hash at its end.
"""

from collections.abc import Sequence

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.prefix import BlockEvent
from kvstow.blocks.prompt import Prompt
from kvstow.errors import SpecError
from kvstow.events.announce import Announcer, GroupKind
from kvstow.events.format import DEVICE, HOST, STORAGE, Medium
from kvstow.events.publisher import EventPublisher
from kvstow.offload.keys import block_keys, tokenwise_groups
from kvstow.offload.rows import matching_group
from kvstow.offload.store import Store
from kvstow.offload.watch import TierChange, TierWatch
from kvstow.plan.identity import Identity

MEDIA: dict[str, Medium] = {"host": HOST, "disk": STORAGE, "remote": STORAGE}
"""What events call the tiers."""


def announce_change(announcer: Announcer, change: TierChange, group: int) -> None:
    """Tell of rows that came to a tier, or went; `group` is the announcer's."""
    tell = announcer.stored if change.stored else announcer.removed
    tell(MEDIA[change.tier], group, change.keys, remote=change.tier == "remote")


class EngineEvents:
    """Events of one ledger, and of a store if there is one, published as they happen."""

    def __init__(
        self, publisher: EventPublisher, *, ledger: Ledger, store: Store | None = None
    ) -> None:
        if ledger.prefixes is None:
            raise SpecError("a ledger without prefixes has no events\n\nhint: leave out caching=")
        layout = ledger.pool.layout
        self._publisher = publisher
        self._layout = layout
        self._announcer = Announcer(
            [GroupKind.of(group, g) for g, group in enumerate(ledger.groups)]
        )
        self._store = store
        self._watch: TierWatch | None = None
        self._engine_group: dict[int, int] = {}
        if store is not None:
            self._watch = TierWatch(store.tiers)
            groups = [g for g, _ in tokenwise_groups(layout)]
            self._engine_group = {matching_group(layout, g, store.layout): g for g in groups}
        ledger.prefixes.on_change.append(self._heard)

    def know(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        salt: str = "",
        identity: Identity | None = None,
    ) -> None:
        """Remember a prompt's tokens, and look for its rows in the tiers.

        `adapter` and `salt` are the words that its requests carry; a prompt with either has a
        `Prompt.salt` of its own, as the ledger demands. `identity` is that of its rows, where it
        is not the store's.
        """
        tokens: Sequence[int] = prompt.tokens.tolist()
        keys: dict[int, list[bytes]] = {}
        if self._store is not None and self._watch is not None:
            own = identity or self._store.identity
            sizes = {group.block_tokens for _, group in tokenwise_groups(self._layout)}
            keys = {size: block_keys(own, prompt, size) for size in sizes}
            for tier_group, g in self._engine_group.items():
                self._watch.note(tier_group, keys[self._layout.groups[g].group.block_tokens])
        for size in {group.block_tokens for _, group in tokenwise_groups(self._layout)}:
            self._announcer.know(
                prompt.hashes(size).tolist(),
                tokens,
                size,
                keys=keys.get(size, ()),
                adapter=adapter,
                salt=salt,
                content=prompt.extra,
            )

    def turn(self) -> None:
        """Look at the tiers, and publish what has changed since the last time."""
        if self._watch is not None:
            self._watch.turn()
            for change in self._watch.take():
                announce_change(self._announcer, change, self._engine_group[change.group])
        self._publisher.publish(self._announcer.take())

    def _heard(self, event: BlockEvent) -> None:
        tell = self._announcer.stored if event.kind == "stored" else self._announcer.removed
        tell(DEVICE, event.group, event.hashes.tolist())
