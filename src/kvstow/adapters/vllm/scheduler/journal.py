"""Which prompts an engine has stored, for `kvstow why`; and, in the log, why one was not found.

The scheduler tells; a thread of its own writes to the journal on disk. A journal that is slow or
broken costs prompts that are not noted, and no step.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvstow.adapters.vllm.protocol import EngineRequest
from kvstow.blocks.prompt import Prompt
from kvstow.errors import StoreError
from kvstow.offload.journal import Journal
from kvstow.offload.why import why_ended
from kvstow.plan.identity import Identity

log = logging.getLogger(__name__)

MOST_WAITING = 256
"""Prompts that may wait for the journal; more are not noted."""


class EngineJournal:
    """The journal of one engine, in its scheduler's process.

    `unit` is the tokens after which blocks of all groups end. With `tokens` the prompts' tokens
    are kept, too, and the first that differs can be named.
    """

    def __init__(
        self, directory: Path, identity: Identity, unit: int, *, tokens: bool = False
    ) -> None:
        self._journal = Journal(directory, tokens=tokens)
        self.identity = identity
        self._unit = unit
        self._thread = ThreadPoolExecutor(1, "kvstow-journal")
        self._waiting: set[Future[None]] = set()

    @property
    def is_full(self) -> bool:
        """Whether so many prompts wait that no more are taken."""
        return len(self._waiting) >= MOST_WAITING

    def stored(self, request: EngineRequest, num_tokens: int) -> None:
        """The first tokens of a request are stored, or on their way."""
        note = self._journal.note
        self._submit(request, num_tokens, lambda prompt, makes: note(prompt, makes, self._unit))

    def looked_up(self, request: EngineRequest, found_tokens: int) -> None:
        """Say in the log, at debug level, why no more of a prompt was found. Its last token is
        always computed, and not looked for."""

        def explain(prompt: Prompt, identity: Identity) -> None:
            try:
                why = why_ended(self._journal, prompt, identity, found_tokens, self._unit)
            except StoreError as error:
                log.debug("request %s: %s", request.id, error)
                return
            log.debug(
                "request %s: %d of %d tokens are found: %s: %s",
                request.id,
                why.found_tokens,
                why.num_tokens,
                why.reason,
                why.text,
            )

        if log.isEnabledFor(logging.DEBUG):
            self._submit(request, len(request.tokens) - 1, explain)

    def _submit(
        self, request: EngineRequest, num_tokens: int, call: Callable[[Prompt, Identity], None]
    ) -> None:
        """Call, in the other thread, with what the rows of the first tokens are stored under."""
        if self.is_full:
            return
        tokens = np.asarray(request.tokens[:num_tokens], np.int64)  # the request's own may grow
        identity = self.identity.for_request(adapter=request.adapter, salt=request.salt)
        extra = request.extra_before(num_tokens)
        job = self._thread.submit(lambda: call(Prompt.of(tokens, extra=extra), identity))
        self._waiting.add(job)
        job.add_done_callback(self._waiting.discard)

    def close(self) -> None:
        """Write what waits."""
        self._thread.shutdown()
