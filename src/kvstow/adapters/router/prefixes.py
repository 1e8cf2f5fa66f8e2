"""What every instance holds of a prompt, heard from its events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstow.errors import SpecError
from kvstow.events.format import EventBatch
from kvstow.events.index import InstanceIndex
from kvstow.events.subscriber import EventSubscriber


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an instance publishes events, and where it repeats those that were missed."""

    url: str
    address: str
    replay: str = ""

    @staticmethod
    def parse(text: str) -> "EventSource":
        """URL=ADDRESS or URL=ADDRESS,REPLAY."""
        url, _, addresses = text.partition("=")
        address, _, replay = addresses.partition(",")
        if not url or not address:
            raise SpecError(
                f"{text!r} does not say whose events are heard where\n\n"
                "hint: http://127.0.0.1:8100=tcp://127.0.0.1:5557,tcp://127.0.0.1:5558"
            )
        return EventSource(url.rstrip("/"), address, replay)


class Prefixes:
    """An index of all instances, kept up to date by one thread each."""

    def __init__(self, sources: Sequence[EventSource]) -> None:
        self.index = InstanceIndex()
        self.urls = tuple(dict.fromkeys(source.url for source in sources))
        self._subscribers: list[EventSubscriber] = []
        try:
            for source in sources:
                self._subscribers.append(self._subscriber(source))
        except SpecError:
            self.close()
            raise

    def _subscriber(self, source: EventSource) -> EventSubscriber:
        def heard(batch: EventBatch) -> None:
            self.index.apply(source.url, batch)

        def lost() -> None:
            self.index.forget(source.url)

        return EventSubscriber(
            source.address, replay=source.replay, on_batch=heard, on_lost=lost
        ).start()

    @property
    def is_empty(self) -> bool:
        """Whether no instance holds anything: then a prompt's tokens need not be known."""
        return not self.index.adapters

    def held(self, tokens: Sequence[int], *, model: str, salt: str) -> Mapping[str, int]:
        """Tokens of a prompt that each instance holds; a model may be the name of an adapter."""
        adapter = model if model in self.index.adapters else ""
        found = self.index.held(tokens, adapter=adapter, salt=salt)
        return {url: held.tokens for url, held in found.items()}

    def close(self) -> None:
        for subscriber in self._subscribers:
            subscriber.close()
        self._subscribers.clear()
