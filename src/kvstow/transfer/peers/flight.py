"""A post of ours, from its start until its memory is quiet: nothing writes to it any more.

It is quiet when the post has ended or when its engine was closed; a failed or abandoned post may
write much later.
"""

from collections.abc import Callable
from logging import getLogger
from typing import TYPE_CHECKING

from kvstow.errors import TransferError
from kvstow.transfer.transport.base import Post

if TYPE_CHECKING:
    from kvstow.transfer.peers.endpoint import Endpoint

log = getLogger(__name__)


class Flight:
    """A post of ours, from its start until its memory is quiet. `then` is called at that time."""

    def __init__(
        self, endpoint: "Endpoint", peer: str, post: Post, then: Callable[[], None]
    ) -> None:
        self.peer = peer
        self.is_quiet = False
        self._endpoint = endpoint
        self._post: Post | None = post
        self.failed_at: float | None = None
        self._then = [then]
        self._error: TransferError | None = None

    def start(self) -> None:
        """Begin to copy. Raises TransferError."""
        assert self._post is not None
        self._endpoint.flights[self] = None
        try:
            self._post.start()
        except TransferError as error:
            self._fail(error)
            raise

    def poll(self) -> bool:
        """Whether all bytes have arrived. Raises TransferError if they never will."""
        arrived = self._post is None
        if self._post is not None:
            if self._error is None:
                arrived = self._look(self._post)
            if self._post.ended:
                self.land()
        if self._error is not None:
            raise self._error
        return arrived

    def _look(self, post: Post) -> bool:
        try:
            return post.poll()
        except TransferError as error:
            self._fail(error)
            return False

    def _fail(self, error: TransferError) -> None:
        self.give_up(error)
        self._endpoint.broken.add(self.peer)
        if error.kind == "peer":
            self._endpoint.note_gone(self.peer)

    def give_up(self, error: TransferError) -> None:
        """Fail, which by itself says nothing about the peer; what is under way may still land."""
        if self._error is None:
            self._error, self.failed_at = error, self._endpoint.clock()

    def after(self, call: Callable[[], None]) -> None:
        """Also call this when the memory is quiet, which it is not yet."""
        self._then.append(call)

    def drop(self) -> None:
        """Forget a post that was never started."""
        if self not in self._endpoint.flights:
            self.land()

    def land(self) -> None:
        """Nothing of this post writes any more: it has ended, or its engine is gone."""
        post, self._post = self._post, None
        if post is None:
            return
        self.is_quiet = True
        self._endpoint.flights.pop(self, None)
        try:
            post.release()
        except TransferError as error:
            log.warning("agent %s: %s", self._endpoint.name, error)
        for call in self._then:
            call()
