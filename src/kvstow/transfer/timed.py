"""A transport that knows how much processor time its engine took: for measurements."""

import time

from kvstow.transfer.transport import Direction, Kinds, Post, Region, Spans, Transport


class TimedTransport:
    """Passes everything on to `inner`; `seconds` is this thread's processor time there."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.seconds = 0.0
        self.posts = 0

    @property
    def name(self) -> str:
        return self.inner.name

    def register(self, region: Region) -> None:
        self.inner.register(region)

    def metadata(self) -> bytes:
        return self.inner.metadata()

    def connect(self, metadata: bytes) -> str:
        started = time.thread_time()
        try:
            return self.inner.connect(metadata)
        finally:
            self.seconds += time.thread_time() - started

    def disconnect(self, peer: str) -> None:
        self.inner.disconnect(peer)

    def post(self, direction: Direction, peer: str, kinds: Kinds, spans: Spans) -> Post:
        started = time.thread_time()
        try:
            return TimedPost(self, self.inner.post(direction, peer, kinds, spans))
        finally:
            self.posts += 1
            self.seconds += time.thread_time() - started

    def progress(self) -> None:
        started = time.thread_time()
        self.inner.progress()
        self.seconds += time.thread_time() - started

    def close(self) -> None:
        self.inner.close()


class TimedPost:
    """A post whose engine's time counts."""

    def __init__(self, owner: TimedTransport, inner: Post) -> None:
        self._owner = owner
        self._inner = inner

    def poll(self) -> bool:
        started = time.thread_time()
        try:
            return self._inner.poll()
        finally:
            self._owner.seconds += time.thread_time() - started

    def release(self) -> None:
        self._inner.release()
