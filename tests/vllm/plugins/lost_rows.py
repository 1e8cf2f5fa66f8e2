"""A plugin for vLLM: rows of one cache group are lost after a hand-over.

`KVSTOW_LOST_GROUP` names a file. While it holds a group's number, that group's blocks are filled
with zeros when a pull has brought them, before the engine computes with them.
"""

import os
from pathlib import Path
from typing import Any


def lose_rows() -> None:
    """Follow the file, if the environment names one. vLLM calls this at its start."""
    name = os.environ.get("KVSTOW_LOST_GROUP")
    if name is None:
        return
    from kvstow.adapters.vllm.worker.pulls import RankPulls

    accept = RankPulls._accept

    def losing(self: Any, pull: Any, transfer: Any) -> None:
        file = Path(name)
        if file.exists():
            group = int(file.read_text())
            layout = self.arena.layout
            for block in pull.ids[group]:
                for run in layout.runs(group, block) if block > 0 else ():
                    self.arena.bytes[run.offset : run.offset + run.nbytes] = 0
        accept(self, pull, transfer)

    RankPulls._accept = losing
