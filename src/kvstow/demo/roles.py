"""What a child does with its model: prefill and offer, pull and go on, or judge."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from kvstow.adapters.transformers import Cache, ModelMemory, cache_name
from kvstow.blocks.prompt import Prompt
from kvstow.demo.messages import (
    Continue,
    Done,
    FromChild,
    Judge,
    Lost,
    Prefill,
    Prefilled,
    Pulled,
    Reload,
    Stored,
    Token,
)
from kvstow.demo.parallel import agreed
from kvstow.demo.weights import Language, LoadedModel
from kvstow.errors import StoreError, TransferError
from kvstow.offload.keys import block_keys, keys_at
from kvstow.offload.store import Store
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.nixl import NixlTransport

CAPACITY = 2 << 30


@dataclass(frozen=True, slots=True)
class PromptStore:
    """A store of prompts, and the memory whose rows it keeps."""

    memory: ModelMemory
    store: Store

    @classmethod
    def open(cls, memory: ModelMemory, path: str) -> Self:
        """The store in a directory, made if it is not there."""
        return cls(memory, Store.open(path, memory.layout, capacity=CAPACITY))

    def save(self, tokens: Sequence[int], blocks: Mapping[int, Blocks]) -> None:
        """Keep all rows of a prompt."""
        for g, listed in blocks.items():
            keys = self._keys(g, tokens, listed)
            kept = self.store.save_rows(self.memory.arena, g, listed.ids, keys)
            if not kept.all():
                raise StoreError(f"{int((~kept).sum())} of {len(keys)} rows were not kept")

    def load(self, tokens: Sequence[int], blocks: Mapping[int, Blocks]) -> None:
        """Bring all rows of a prompt back."""
        for g, listed in blocks.items():
            keys = self._keys(g, tokens, listed)
            found = self.store.load_rows(self.memory.arena, g, keys, listed.ids)
            if not found.all():
                raise StoreError(f"{int((~found).sum())} of {len(keys)} rows are not in the store")

    def _keys(self, g: int, tokens: Sequence[int], listed: Blocks) -> list[bytes]:
        """A key says which tokens a row depends on: all up to its end, or to the prompt's."""
        group = self.memory.layout.groups[g].group
        prompt, identity = Prompt.of(np.asarray(tokens)), self.memory.layout.identity
        assert identity is not None
        if isinstance(group.retention, State):
            return keys_at(identity, prompt, [len(tokens)] * len(listed))
        whole = block_keys(identity, prompt, group.block_tokens)
        rest = keys_at(identity, prompt, [len(tokens)])
        return [(*whole, *rest)[int(k)] for k in listed.index]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()


Say = Callable[[FromChild], None]


@dataclass(slots=True)
class Stream:
    """Tells each token as it comes. `generate` puts the prompt first."""

    say: Say
    prompt: int
    language: Language
    began: float
    tokens: list[int] = field(default_factory=list[int])
    to_first: float = 0.0
    _shown: str = ""
    _started: bool = False

    def put(self, value: torch.Tensor) -> None:
        """One more step of `generate`."""
        if not self._started:
            self._started = True
            return
        self.to_first = self.to_first or time.monotonic() - self.began
        token = int(value.reshape(-1)[0])
        self.tokens.append(token)
        text = self.language.decode(self.tokens)
        self.say(Token(prompt=self.prompt, token=token, text=text[len(self._shown) :]))
        self._shown = text

    def begin_with(self, token: int) -> None:
        """A token that somebody else has told already."""
        self.tokens.append(token)
        self._shown = self.language.decode(self.tokens)

    def end(self) -> None:
        """`generate` has finished."""


class Engine:
    """A model and, where rows are kept, its memory, agent and store."""

    def __init__(
        self, opened: LoadedModel, say: Say, memory: ModelMemory | None = None, store: str = ""
    ) -> None:
        self.model, self.language, self.say = opened.model, opened.language, say
        self.memory = memory
        self._open = ExitStack()
        self._offered: dict[int, tuple[Cache, Ticket]] = {}
        if memory is not None:
            self.agent = self._open.enter_context(
                Agent(memory.arena, memory.pool, transport=NixlTransport())
            )
            self.kept = self._open.enter_context(PromptStore.open(memory, store)) if store else None

    def close(self) -> None:
        """Let go of everything."""
        for prompt in [*self._offered]:
            self.finish(prompt)
        self._open.close()

    # ── prefill ───────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def prefill(self, message: Prefill, *, reuse: bool) -> None:
        """Compute a prompt, say what follows it, offer its rows."""
        assert self.memory is not None
        tokens = torch.tensor([message.tokens])
        cache = Cache(self.memory, tokens=tokens if reuse else None)
        rest = tokens[:, cache.num_tokens :]
        outcome = self.model(input_ids=rest, use_cache=True, **{cache_name(self.model): cache})
        first = int(outcome.logits[0, -1].argmax())
        ticket = self.agent.offer_blocks(
            cache.blocks(0), len(message.tokens), readers=message.readers, lease_seconds=60.0
        )
        self._offered[message.prompt] = cache, ticket
        self.say(
            Prefilled(
                prompt=message.prompt,
                ticket=str(ticket),
                first=first,
                text=self.language.decode([first]),
            )
        )

    def finish(self, prompt: int) -> None:
        """The rows of a prompt may be reused."""
        cache, ticket = self._offered.pop(prompt)
        self.agent.withdraw(ticket)
        self.agent.settle()
        cache.close()

    # ── decode ────────────────────────────────────────────────────────────────────

    def go_on(self, message: Continue) -> None:
        """Pull a prompt's rows and generate from there; compute the prompt if that fails."""
        began = time.monotonic()
        stream = self._stream(message.prompt, message.first, began)
        cache = self._pulled(message)
        with cache or Cache(self._rows(), tokens=torch.tensor([message.tokens])) as cache:
            if self.kept is not None:
                self._keep(message, cache)
            self._generate(message, cache, stream)

    def _pulled(self, message: Continue) -> Cache | None:
        memory = self._rows()
        began = time.monotonic()
        prompt = Prompt.of(np.array(message.tokens))
        admission = memory.ledger.admit(prompt)
        memory.copy(admission.copies)
        into = self._missing(memory.ledger.blocks(admission.request), admission.hit_tokens)
        tickets = [Ticket.parse(ticket) for ticket in message.tickets]
        failure = stats = None
        try:
            stats = self.agent.pull(
                tickets, into=into, start_token=admission.hit_tokens, digest="always"
            ).wait()
        except TransferError as error:
            failure = error
        if not agreed(stats is not None) or stats is None:
            memory.ledger.release(admission.request, computed_tokens=admission.hit_tokens)
            why = str(failure or "another rank's rows did not arrive")
            self.say(Lost(prompt=message.prompt, why=why, seconds=time.monotonic() - began))
            return None
        groups = memory.layout.groups
        self.say(
            Pulled(
                prompt=message.prompt,
                nbytes=stats.nbytes,
                descriptors=stats.descriptors,
                regions=stats.sources,
                seconds=stats.seconds,
                rows=sum(len(blocks) for blocks in into.values()),
                per_layer=sum(len(into[g]) * groups[g].group.num_tensors for g in into),
                fence=stats.fence,
                digest=stats.digest,
                direction=" ".join(sorted(set(stats.directions))),
            )
        )
        return Cache(memory, requests=[admission.request], num_tokens=len(message.tokens))

    def _missing(self, blocks: dict[int, Blocks], hit_tokens: int) -> dict[int, Blocks]:
        """What a prefix hit has not brought already."""
        missing: dict[int, Blocks] = {}
        for g, listed in blocks.items():
            group = self._rows().layout.groups[g].group
            state = isinstance(group.retention, State)
            fresh = listed.index >= (0 if state else hit_tokens // group.block_tokens)
            missing[g] = Blocks(listed.ids[fresh], listed.index[fresh])
        return missing

    def _keep(self, message: Continue, cache: Cache) -> None:
        assert self.kept is not None
        if cache.num_tokens == len(message.tokens):
            self.kept.save(message.tokens, cache.blocks(0))
            self.say(Stored(prompt=message.prompt))

    def reload(self, message: Reload) -> None:
        """Take a prompt's rows from the store and generate from there."""
        assert self.kept is not None
        memory = self._rows()
        began = time.monotonic()
        stream = self._stream(message.prompt, message.first, began)
        request = memory.ledger.admit(len(message.tokens)).request
        self.kept.load(message.tokens, memory.ledger.blocks(request))
        length = len(message.tokens)
        with Cache(memory, requests=[request], num_tokens=length) as cache:
            self._generate(message, cache, stream)

    def _rows(self) -> ModelMemory:
        assert self.memory is not None
        return self.memory

    # ── generation ────────────────────────────────────────────────────────────────

    def _stream(self, prompt: int, first: int, began: float) -> Stream:
        stream = Stream(self.say, prompt, self.language, began)
        stream.begin_with(first)
        return stream

    def _generate(self, message: Continue | Reload, cache: Cache, stream: Stream) -> None:
        if message.limit > 1 and message.first not in self._ends():
            self._run([*message.tokens, message.first], message.limit - 1, stream, cache)
        self._done(message.prompt, stream)

    def judge(self, message: Judge) -> None:
        """Generate the whole answer with the model's own cache."""
        stream = Stream(self.say, message.prompt, self.language, time.monotonic())
        self._run(message.tokens, message.limit, stream, None)
        self._done(message.prompt, stream)

    def _run(self, tokens: Sequence[int], limit: int, stream: Stream, cache: Cache | None) -> None:
        name = cache_name(self.model)
        given: dict[str, Any] = {} if cache is None else {name: cache}
        seen = cache.num_tokens if cache is not None and name != "past_key_values" else 0
        ids = torch.tensor([tokens[seen:]])  # `generate` leaves out what `past_key_values` has seen
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            do_sample=False,
            streamer=stream,
            **given,
        )

    def _ends(self) -> set[int]:
        """Tokens after which there is nothing to say."""
        end: int | list[int] | None = self.model.generation_config.eos_token_id
        return set(end) if isinstance(end, list) else {-1 if end is None else end}

    def _done(self, prompt: int, stream: Stream) -> None:
        self.say(Done(prompt=prompt, tokens=tuple(stream.tokens), to_first=stream.to_first))
