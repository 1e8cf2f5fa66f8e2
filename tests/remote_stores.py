"""A prompt's rows in stores of any layout, by value; nothing here comes from kvstow.offload."""

import numpy as np

from kvstow.blocks.prompt import Prompt
from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, State, Window
from kvstow.plan.spec import Extent
from kvstow.route.blocks import Blocks
from offloading import IDENTITY, layer

TOKENS = 24
WINDOW = 8
PROMPT = Prompt.of(np.arange(100, 100 + TOKENS), salt=b"tenant")


def layout_of(
    tp=(0, 1),
    *,
    pp=(0, 1),
    order="BLHNC",
    block_tokens=4,
    num_slabs=32,
    identity=IDENTITY,
    windows=True,
):
    """Three full, two window, one recurrent layer; heads split over tp ranks, layers over pp."""
    rank, size = tp
    heads = Extent("head", 4, ((4 // size * rank, 4 // size * (rank + 1)),))
    layers = [
        *(layer(f"l.{i}", Full(), block_tokens=block_tokens, heads=heads) for i in (0, 2, 4)),
        *(layer(f"l.{i}", Window(WINDOW), block_tokens=block_tokens, heads=heads) for i in (1, 3)),
        layer("l.5", State(), block_tokens=block_tokens),
    ]
    if not windows:
        layers = [one for one in layers if not isinstance(one.retention, Window)]
    if pp[1] > 1:
        layers = [one for one in layers if int(one.name[2:]) * pp[1] // 6 == pp[0]]
    site = Site(model="m", order=order, tp=tp, pp=pp)
    return packed(grouped(layers), num_slabs=num_slabs, site=site).identified(identity)


def value(name, field, head, token, content):
    """What a cell holds; by content, so that a misplaced one shows."""
    which = int(name.split(".")[1]) * 2 + (field == "v")
    return np.float16((which * 13 + head * 7 + token * 3 + content) % 2039)


def fill(arena, group, block, first, count):
    """Write `count` tokens from `first` on into a block of the arena."""
    for spec in arena.layout.groups[group].group.layers:
        heads = [h for lo, hi in spec.heads.pieces for h in range(lo, hi)]
        for field in ("k", "v"):
            view = arena.field(spec.name, field).numpy()
            for h, head in enumerate(heads):
                for t in range(min(count, spec.states)):
                    view[block, h, t] = [
                        value(spec.name, field, head, first + t, c) for c in range(8)
                    ]


def blocks_of(layout, num_tokens):
    """A request's blocks by group, as a ledger lists them: windows hold what they still see."""
    found, start = {}, 1
    for g, rows in enumerate(layout.groups):
        size = rows.group.block_tokens
        if isinstance(rows.group.retention, State):
            index = np.array([0])
        else:
            first = 0
            if isinstance(rows.group.retention, Window):
                first = max(0, num_tokens - WINDOW + 1) // size
            index = np.arange(first, -(-num_tokens // size))
        ids = np.arange(len(index)) + rows.rows_per_slab * start
        start += -(-len(index) // rows.rows_per_slab)
        found[g] = Blocks(ids, index)
    return found


def filled(layout, num_tokens=TOKENS):
    """An arena that has computed a prompt of so many tokens, and its blocks."""
    arena, blocks = Arena(layout), blocks_of(layout, num_tokens)
    for g, listed in blocks.items():
        _each(arena, g, listed, num_tokens, fill)
    return arena, blocks


def check(arena, blocks, num_tokens=TOKENS):
    """Every value of every token that a next token sees is there."""
    expected, _ = filled(arena.layout, num_tokens)
    for g, listed in blocks.items():
        windowed = isinstance(arena.layout.groups[g].group.retention, Window)
        seen = max(0, num_tokens - WINDOW + 1) if windowed else 0

        def compare(arena, group, block, first, count, seen=seen):
            states = slice(max(0, seen - first), count)
            for spec in arena.layout.groups[group].group.layers:
                for field in ("k", "v"):
                    got = arena.field(spec.name, field).numpy()[block, :, states]
                    want = expected.field(spec.name, field).numpy()[block, :, states]
                    assert got.size
                    assert (got == want).all()

        _each(arena, g, listed, num_tokens, compare)


def _each(arena, group, listed, num_tokens, what):
    rows = arena.layout.groups[group].group
    for block, k in zip(listed.ids.tolist(), listed.index.tolist(), strict=True):
        if isinstance(rows.retention, State):
            what(arena, group, block, num_tokens, 1)
        else:
            first = k * rows.block_tokens
            what(arena, group, block, first, min(rows.block_tokens, num_tokens - first))
