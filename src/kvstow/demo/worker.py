"""A child process of the demo: `python -m kvstow.demo.worker`, spoken to by lines."""

import logging
import os
import sys
import threading
import traceback
import warnings
from importlib import import_module
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kvstow.demo.messages import (
    ChildFailed,
    Continue,
    Encode,
    Encoded,
    Finish,
    FromChild,
    GroupFacts,
    Judge,
    Load,
    PlanFacts,
    Prefill,
    Progress,
    Ready,
    Reload,
    ToChild,
    line,
    to_child,
)
from kvstow.errors import KvstowError

if TYPE_CHECKING:
    from kvstow.adapters.transformers import ModelMemory
    from kvstow.demo.roles import Engine
    from kvstow.demo.weights import LoadedModel
    from kvstow.plan.layout import Layout


class Worker:
    """One child: says what it does on the pipe that was its standard output."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self.engine: Engine | None = None
        self.reuse = True

    def say(self, message: FromChild) -> None:
        """Tell the parent."""
        data = line(message)
        while data:
            data = data[os.write(self._pipe, data) :]

    def heard(self, message: ToChild) -> None:
        """Do what the parent asks."""
        if isinstance(message, Load):
            self._load(message)
            return
        assert self.engine is not None
        match message:
            case Encode(texts=texts):
                spoken = tuple(tuple(self.engine.language.encode(text)) for text in texts)
                self.say(Encoded(tokens=spoken))
            case Prefill():
                self.engine.prefill(message, reuse=self.reuse)
            case Finish(prompt=prompt):
                self.engine.finish(prompt)
            case Continue():
                self.engine.go_on(message)
            case Reload():
                self.engine.reload(message)
            case Judge():
                self.engine.judge(message)

    def prepare(self) -> None:
        """Import what takes seconds, before anything is asked."""
        self.say(Progress(what="importing torch and transformers"))
        import torch

        import_module("kvstow.demo.roles")
        torch.set_num_threads(1)
        self.say(Progress(what="waiting for the weights"))

    def _load(self, message: Load) -> None:
        from kvstow.demo.roles import Engine
        from kvstow.demo.weights import load_model

        found = load_model(message.model, lambda what: self.say(Progress(what=what)))
        if message.role == "single":
            self.engine = Engine(found, self.say)
            self.say(Ready(model=found.name))
            return
        memory, how = self._memory(message, found)
        self.engine = Engine(found, self.say, memory, message.store)
        self.say(Ready(model=found.name, plan=plan_of(memory.layout), how=how))

    def _memory(self, message: Load, found: "LoadedModel") -> "tuple[ModelMemory, str]":
        from kvstow.adapters.transformers import HeadShard, ModelMemory, model_identity
        from kvstow.demo.parallel import can_split, check_heads, split

        how, shard = "one process", HeadShard()
        identity = model_identity(found.model, name=found.name)  # before the weights are split
        if message.ranks > 1:
            check_heads(found.model, message.ranks)
            if can_split(found.model, message.ranks):
                self.say(Progress(what="meeting the other ranks"))
                split(found.model, rank=message.rank, ranks=message.ranks, port=message.meeting)
                how = f"{message.ranks} ranks, each computes its heads (torch.distributed)"
                shard = HeadShard(message.rank, message.ranks)
            elif message.role == "prefill":
                how = f"{message.ranks} ranks, each computes all and keeps its heads"
                shard = HeadShard(message.rank, message.ranks, computes_all=True)
                self.reuse = False
            else:
                raise KvstowError(
                    f"{found.name} cannot be decoded on {message.ranks} ranks\n\n"
                    "hint: --tp-decode 1"
                )
        self.say(Progress(what="planning rows"))
        memory = ModelMemory.of(
            found.model,
            budget=message.memory,
            block_tokens=message.block_tokens,
            order=message.order,
            shard=shard,
            identity=identity,
        )
        return memory, how


def plan_of(layout: "Layout") -> PlanFacts:
    """A layout in the words of the screen."""
    groups = tuple(
        GroupFacts(
            name=rows.group.name,
            layers=len(rows.group.layers),
            block_tokens=rows.group.block_tokens,
            row_bytes=layout.row_bytes(g),
            rows_per_slab=rows.rows_per_slab,
            tensors=rows.group.num_tensors,
        )
        for g, rows in enumerate(layout.groups)
    )
    return PlanFacts(
        order=layout.order,
        groups=groups,
        slab_bytes=layout.slab_bytes,
        arena_bytes=layout.nbytes,
    )


def main() -> None:
    """Listen until standard input ends; then end at once, whatever is going on."""
    pipe = os.dup(1)
    os.dup2(2, 1)  # what libraries print belongs in the log
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    orders: SimpleQueue[ToChild] = SimpleQueue()

    def listen() -> None:
        for data in sys.stdin.buffer:
            orders.put(to_child(data))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    worker = Worker(pipe)
    try:
        worker.prepare()
        while True:
            worker.heard(orders.get())
    except KvstowError as error:
        worker.say(ChildFailed(error=str(error)))
    except Exception as error:
        last = f"{type(error).__name__}: {error}"
        worker.say(ChildFailed(error=last, trace=traceback.format_exc()))
    threading.Event().wait()  # the parent decides when


if __name__ == "__main__":
    main()
