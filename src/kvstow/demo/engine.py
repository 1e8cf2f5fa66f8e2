"""What a child does with its model: prefill and offer, pull and continue, or answer alone."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstow.adapters.transformers import Cache, ModelMemory, cache_name
from kvstow.blocks.prompt import Prompt
from kvstow.child import Say
from kvstow.demo.report import DemoAnswer, DemoTransfer
from kvstow.demo.weights import load_checkpoint
from kvstow.errors import TransferError
from kvstow.offload.store import Store
from kvstow.plan.layout import Order
from kvstow.plan.manifest import encode
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.nixl import NixlTransport

STORE_BYTES = "2GiB"
LEASE_SECONDS = 60.0


class DemoEngine:
    """A model and, once there are rows, their memory and the agent that offers and pulls them."""

    _memory: ModelMemory | None = None
    _store: Path | None = None
    _agent: Agent

    def __init__(self, say: Say) -> None:
        self._say = say
        self._prompt = ExitStack()
        """What is open for the current prompt."""
        torch.set_num_threads(1)

    def load(self, model: str, texts: Sequence[str] = ()) -> tuple[str, list[list[int]]]:
        """Get the model ready; its name, and these texts in its tokens."""
        self._loaded = load_checkpoint(model, self._say)
        self._model = self._loaded.model
        return self._loaded.name, [self._loaded.encode(text) for text in texts]

    def load_rows(
        self, model: str, block_tokens: int, order: Order, memory: int, store: Path | None
    ) -> bytes:
        """Get the model ready, plan its rows, start an agent; the layout's manifest.

        Rows of prompts are kept in the directory `store`, if there is one.
        """
        self.load(model)
        self._store = store
        self._memory = ModelMemory.of(
            self._model,
            budget=memory,
            block_tokens=block_tokens,
            order=order,
            name=self._loaded.name,
        )
        self._agent = Agent(self._memory.arena, self._memory.pool, transport=NixlTransport())
        self._agent.__enter__()
        self._say("ready")
        return encode(self._memory.layout)

    @property
    def memory(self) -> ModelMemory:
        assert self._memory is not None
        return self._memory

    # ── prefill ───────────────────────────────────────────────────────────────────

    def prefill(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Compute a prompt and offer its rows until `finish`; the ticket, and the next token."""
        cache = self._cache(tokens)
        first = next(self._generated(tokens, cache))
        ticket = self._agent.offer_blocks(cache.blocks(0), len(tokens), lease_seconds=LEASE_SECONDS)
        self._prompt.callback(self._agent.settle)
        self._prompt.callback(self._agent.withdraw, ticket)
        return str(ticket), first

    def finish(self) -> None:
        """Release the prompt's rows; they are on disk afterwards, where there is a store."""
        self._prompt.close()

    def _cache(self, prompt: Sequence[int]) -> Cache:
        """A cache with what memory and store have of a prompt, open until `finish`."""
        tokens = torch.tensor([prompt])
        if self._store is None:
            return self._prompt.enter_context(Cache(self.memory, tokens=tokens))
        store = self._prompt.enter_context(Store(disk=self._store, disk_bytes=STORE_BYTES))
        cache = self._prompt.enter_context(Cache(self.memory, tokens=tokens, store=store))
        cache.prefill(self._model, tokens)
        return cache

    # ── decode ────────────────────────────────────────────────────────────────────

    def decode(self, tokens: Sequence[int], first: int, ticket: str, limit: int) -> DemoAnswer:
        """Pull a prompt's rows and generate from there; compute the prompt if that fails."""
        began = time.monotonic()
        with self._prompt:
            try:
                cache, transfer = self._pull(tokens, ticket)
                failure = ""
            except TransferError as error:
                cache, transfer, failure = self._cache(tokens), None, str(error)
            answer = self._answer(tokens, [first], limit, cache, began)
            return replace(answer, transfer=transfer, failure=failure)

    def _pull(self, tokens: Sequence[int], ticket: str) -> tuple[Cache, DemoTransfer]:
        """A cache over rows that were pulled, as far as a common prefix has not left them here."""
        memory = self.memory
        admission = memory.ledger.admit(Prompt.of(np.array(tokens)))
        memory.copy(admission.copies)
        missing = self._missing(memory.ledger.blocks(admission.request), admission.hit_tokens)
        try:
            stats = self._agent.pull(
                [Ticket.parse(ticket)],
                into=missing,
                start_token=admission.hit_tokens,
                digest="always",
            ).wait()
        except TransferError:
            memory.ledger.release(admission.request, computed_tokens=admission.hit_tokens)
            raise
        groups = memory.layout.groups
        transfer = DemoTransfer(
            nbytes=stats.nbytes,
            descriptors=stats.descriptors,
            regions=stats.sources,
            seconds=stats.seconds,
            rows=sum(len(blocks) for blocks in missing.values()),
            per_layer=sum(len(missing[g]) * groups[g].group.num_tensors for g in missing),
            fence=stats.fence,
            digest=stats.digest,
            direction=" ".join(sorted(set(stats.directions))),
        )
        cache = Cache(memory, requests=[admission.request])
        return self._prompt.enter_context(cache), transfer

    def _missing(self, blocks: dict[int, Blocks], hit_tokens: int) -> dict[int, Blocks]:
        """The blocks behind a prefix hit."""
        for g, group in enumerate(self.memory.ledger.groups):
            if not isinstance(group.retention, State):
                blocks[g] = blocks[g].since(hit_tokens // group.block_tokens)
        return blocks

    # ── answers ───────────────────────────────────────────────────────────────────

    def answer(self, tokens: Sequence[int], limit: int) -> DemoAnswer:
        """Generate a whole answer: alone, or from what the store has of the prompt."""
        began = time.monotonic()
        with self._prompt:
            cache = None if self._memory is None else self._cache(tokens)
            return self._answer(tokens, [], limit, cache, began)

    def _answer(
        self,
        prompt: Sequence[int],
        answer: list[int],
        limit: int,
        cache: Cache | None,
        began: float,
    ) -> DemoAnswer:
        """An answer of up to `limit` tokens, some of which may be known already."""
        ends = _end_tokens(self._model)
        to_first = 0.0
        steps = self._generated([*prompt, *answer], cache)
        while len(answer) < limit and not ends.intersection(answer[-1:]):
            answer.append(next(steps))
            to_first = to_first or time.monotonic() - began
        return DemoAnswer(
            tokens=tuple(answer),
            text=self._loaded.decode(answer),
            to_first=to_first,
            found_tokens=0 if cache is None else cache.found_tokens,
        )

    def _generated(self, tokens: Sequence[int], cache: Any) -> Iterator[int]:
        """What the model says behind these tokens, greedily: in a cache of ours, or its own."""
        name = cache_name(self._model)
        step = list(tokens[0 if cache is None else cache.num_tokens :])
        while True:
            options: dict[str, Any] = {} if cache is None else {name: cache}
            with torch.no_grad():
                outcome = self._model(input_ids=torch.tensor([step]), use_cache=True, **options)
            cache, step = outcome[name], [int(outcome.logits[0, -1].argmax())]
            yield step[0]


def _end_tokens(model: Any) -> set[int]:
    """Tokens after which there is nothing to say."""
    end: int | list[int] | None = model.generation_config.eos_token_id
    return set(end) if isinstance(end, list) else {-1 if end is None else end}
