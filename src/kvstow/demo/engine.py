"""What a child does with its model: prefill and offer, pull and go on, or answer alone."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from kvstow.adapters.transformers import Cache, ModelMemory, cache_name
from kvstow.blocks.prompt import Prompt
from kvstow.demo.messages import (
    Answer,
    Continue,
    Done,
    Finish,
    Finished,
    FromChild,
    Load,
    Lost,
    Prefill,
    Prefilled,
    Progress,
    Pulled,
    Ready,
    ToChild,
    Token,
)
from kvstow.demo.weights import load_model
from kvstow.errors import TransferError
from kvstow.offload.store import Store
from kvstow.plan.manifest import encode as manifest
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.nixl import NixlTransport

STORE_BYTES = "2GiB"
LEASE_SECONDS = 60.0

Say = Callable[[FromChild], None]


class DemoEngine:
    """A model and, where it keeps rows, their memory and the agent that offers and pulls them."""

    def __init__(self, load: Load, say: Say) -> None:
        self._say = say
        torch.set_num_threads(1)
        loaded = load_model(load.model, lambda what: say(Progress(what=what)))
        self._model, self._language = loaded.model, loaded.language
        self._ends = _end_tokens(loaded.model)
        self._memory: ModelMemory | None = None
        self._store_path = load.store
        self._prompt = ExitStack()
        """What is open for the prompt of now."""
        if load.rows is not None:
            say(Progress(what="planning rows"))
            self._memory = ModelMemory.of(
                loaded.model,
                budget=load.rows.memory,
                block_tokens=load.rows.block_tokens,
                order=load.rows.order,
                name=loaded.name,
            )
            self._agent = Agent(self._memory.arena, self._memory.pool, transport=NixlTransport())
            self._agent.__enter__()
        layout = "" if self._memory is None else manifest(self._memory.layout).decode()
        prompts = tuple(tuple(self._language.encode(text)) for text in load.texts)
        say(Ready(model=loaded.name, prompts=prompts, manifest=layout))

    def obey(self, message: ToChild) -> None:
        """Do what the parent says."""
        match message:
            case Prefill():
                self.prefill(message)
            case Finish():
                self._prompt.close()
                self._say(Finished())
            case Continue():
                self.go_on(message)
            case Answer():
                self.answer(message)
            case Load():
                raise AssertionError("a child loads one model")

    @property
    def memory(self) -> ModelMemory:
        assert self._memory is not None
        return self._memory

    # ── prefill ───────────────────────────────────────────────────────────────────

    def prefill(self, message: Prefill) -> None:
        """Compute a prompt, say what follows it, offer its rows until `Finish`."""
        cache = self._cache(message.tokens)
        first = next(self._generated(message.tokens, cache))
        ticket = self._agent.offer_blocks(
            cache.blocks(0), len(message.tokens), lease_seconds=LEASE_SECONDS
        )
        self._prompt.callback(self._agent.settle)
        self._prompt.callback(self._agent.withdraw, ticket)
        text = self._language.decode([first])
        self._say(Prefilled(ticket=str(ticket), first=first, text=text))

    def _cache(self, prompt: Sequence[int]) -> Cache:
        """A cache with what memory and store know of a prompt, open until `Finish`."""
        tokens = torch.tensor([prompt])
        if not self._store_path:
            return self._prompt.enter_context(Cache(self.memory, tokens=tokens))
        store = self._prompt.enter_context(Store(disk=self._store_path, disk_bytes=STORE_BYTES))
        cache = self._prompt.enter_context(Cache(self.memory, tokens=tokens, store=store))
        cache.prefill(self._model, tokens)
        return cache

    # ── decode ────────────────────────────────────────────────────────────────────

    def go_on(self, message: Continue) -> None:
        """Pull a prompt's rows and generate from there; compute the prompt if that fails."""
        began = time.monotonic()
        with self._prompt:
            cache = self._pulled(message) or self._cache(message.tokens)
            self._stream(message.tokens, [message.first], message.limit, cache, began)

    def _pulled(self, message: Continue) -> Cache | None:
        """A cache over rows that were pulled; None where they did not arrive."""
        began = time.monotonic()
        memory = self.memory
        admission = memory.ledger.admit(Prompt.of(np.array(message.tokens)))
        memory.copy(admission.copies)
        missing = self._missing(memory.ledger.blocks(admission.request), admission.hit_tokens)
        try:
            stats = self._agent.pull(
                [Ticket.parse(message.ticket)],
                into=missing,
                start_token=admission.hit_tokens,
                digest="always",
            ).wait()
        except TransferError as error:
            memory.ledger.release(admission.request, computed_tokens=admission.hit_tokens)
            self._say(Lost(why=str(error), seconds=time.monotonic() - began))
            return None
        groups = memory.layout.groups
        self._say(
            Pulled(
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
        )
        length = len(message.tokens)
        return self._prompt.enter_context(
            Cache(memory, requests=[admission.request], num_tokens=length)
        )

    def _missing(self, blocks: dict[int, Blocks], hit_tokens: int) -> dict[int, Blocks]:
        """What a prefix hit has not brought already."""
        missing: dict[int, Blocks] = {}
        for g, listed in blocks.items():
            group = self.memory.layout.groups[g].group
            is_state = isinstance(group.retention, State)
            first = 0 if is_state else hit_tokens // group.block_tokens
            missing[g] = Blocks(
                listed.ids[listed.index >= first], listed.index[listed.index >= first]
            )
        return missing

    # ── answers ───────────────────────────────────────────────────────────────────

    def answer(self, message: Answer) -> None:
        """Generate a whole answer: alone, or from what the store has of the prompt."""
        began = time.monotonic()
        with self._prompt:
            cache = None if self._memory is None else self._cache(message.tokens)
            self._stream(message.tokens, [], message.limit, cache, began)

    def _stream(
        self,
        prompt: Sequence[int],
        answer: list[int],
        limit: int,
        cache: Cache | None,
        began: float,
    ) -> None:
        """Say an answer token by token, up to so many; some of them may have been said already."""
        text = self._language.decode(answer)
        to_first = 0.0
        steps = self._generated([*prompt, *answer], cache)
        while len(answer) < limit and not self._ends.intersection(answer[-1:]):
            answer.append(next(steps))
            to_first = to_first or time.monotonic() - began
            whole = self._language.decode(answer)
            self._say(Token(text=whole[len(text) :]))
            text = whole
        found = 0 if cache is None else cache.found_tokens
        self._say(Done(tokens=tuple(answer), to_first=to_first, found=found))

    def _generated(self, tokens: Sequence[int], cache: Any) -> Iterator[int]:
        """What the model says behind these tokens, greedily: in a cache of ours, or its own."""
        name = cache_name(self._model)
        step = list(tokens[0 if cache is None else cache.num_tokens :])
        while True:
            given: dict[str, Any] = {} if cache is None else {name: cache}
            with torch.no_grad():
                outcome = self._model(input_ids=torch.tensor([step]), use_cache=True, **given)
            cache, step = outcome[name], [int(outcome.logits[0, -1].argmax())]
            yield step[0]


def _end_tokens(model: Any) -> set[int]:
    """Tokens after which there is nothing to say."""
    end: int | list[int] | None = model.generation_config.eos_token_id
    return set(end) if isinstance(end, list) else {-1 if end is None else end}
