"""Offload: keep a request's rows on disk, lose the memory, bring them back.

python examples/offload.py [DIR]
"""

import sys
import tempfile

import torch

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.memory.arena import Arena
from kvstow.offload.keys import block_keys
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.models import load_model, model_layers
from kvstow.plan.pack import Site, packed

TOKENS = list(range(1000, 1160))


def main(place: str) -> None:
    groups = grouped(model_layers(load_model("qwen3-0.6b")).layers)
    # Of a model on disk: Identity.of(model_dir). Here nothing but random numbers is stored.
    identity = Identity.of_tensors("qwen3-0.6b", {}, [("random", "bfloat16", b"seed 7")])
    layout = packed(groups, budget=64 << 20, site=Site(model="qwen3-0.6b")).identified(identity)
    keys = block_keys(identity, Prompt.of(TOKENS), 16)

    arena, ledger = Arena(layout), Ledger(Pool(layout))
    ids = ledger.blocks(ledger.admit(len(TOKENS)).request)[0].ids
    layer = next(iter(layout.layers))
    arena.tensor(layer)[ids] = torch.randn(arena.tensor(layer)[ids].shape).to(torch.bfloat16)
    before = arena.tensor(layer)[ids].clone()
    with Store.open(place, layout, capacity=256 << 20) as store:
        kept = store.save(arena, 0, ids, keys)
    print(f"{int(kept.sum())} rows of {layout.row_bytes(0):,} bytes kept in {place}")
    arena.close()

    fresh, ledger = Arena(layout), Ledger(Pool(layout))
    ids = ledger.blocks(ledger.admit(len(TOKENS)).request)[0].ids
    with Store.open(place, layout) as store:
        found = store.load(fresh, 0, keys, ids)
    same = torch.equal(fresh.tensor(layer)[ids], before)
    print(f"{int(found.sum())} rows came back, {'identical' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/store")
