"""Random models, split over ranks, laid out and handed to requests; and a byte oracle.

The oracle knows the address law only: it lists, byte by byte, which logical byte of the
model (layer, field, head, state, place in the field) lies where.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from hypothesis import strategies as st

from kvstow.plan.group import Group, grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Alignment, Site, packed, separate, union
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.route.blocks import Blocks
from planning import section_numbers

PACKS = {"packed": packed, "union": union, "separate": separate}

# ── models ────────────────────────────────────────────────────────────────────────────


def share(units: int, rank: int, size: int) -> tuple[int, int]:
    """Contiguous and nearly even; the same unit on several ranks where there are too few."""
    lo = rank * units // size
    return lo, max(lo + 1, (rank + 1) * units // size)


@dataclass(frozen=True)
class Kind:
    """A layer of the whole model. `parts` are sub-projections of a recurrent layer."""

    retention: Retention
    heads: int
    fields: tuple[tuple[str, DType, int], ...]
    state_tokens: int = 1
    parts: tuple[int, ...] = ()
    align: int = 1
    sections: tuple[int, ...] = ()

    def spec(
        self, name: str, tp: tuple[int, int], states: int, *, in_sections: bool = True
    ) -> LayerSpec:
        """One rank's part of it; the fields in sections of their own, or all in one."""
        sections = self.sections if in_sections and self.sections else (0,) * len(self.fields)
        if self.parts:
            return self._recurrent(name, tp)
        return LayerSpec(
            name=name,
            retention=self.retention,
            block_tokens=states * self.state_tokens,
            states=states,
            heads=Extent("head", self.heads, (share(self.heads, *tp),)),
            fields=tuple(
                Field(field, dtype, (Extent.whole("content", size),), section)
                for (field, dtype, size), section in zip(self.fields, sections, strict=True)
            ),
            align=self.align,
        )

    def _recurrent(self, name: str, tp: tuple[int, int]) -> LayerSpec:
        pieces: list[tuple[int, int]] = []
        start = 0
        for units in self.parts:
            lo, hi = share(units, *tp)
            pieces.append((start + lo, start + hi))
            start += units
        heads = Extent("ssm_head", self.heads, (share(self.heads, *tp),))
        return LayerSpec(
            name=name,
            retention=State(),
            block_tokens=32,
            states=1,
            heads=Extent.whole("head", 1),
            fields=(
                Field(
                    "conv",
                    DType.BFLOAT16,
                    (Extent("channel", start, tuple(pieces)), Extent.whole("tap", 2)),
                ),
                Field("ssm", DType.FLOAT32, (heads, Extent.whole("state", 2))),
            ),
            align=self.align,
        )


@dataclass(frozen=True)
class Served:
    """How one side serves a model: ranks, tokens per block by retention, order, packing."""

    tp: int
    pp: int
    states: Mapping[Retention, int]
    order: str
    pack: str
    alignment: Alignment
    in_sections: bool = True

    def layers(self, kinds: tuple[Kind, ...], tp_rank: int, pp_rank: int) -> list[LayerSpec]:
        """One rank's layers. Tokens per block are a multiple of what any state stands for."""
        lo, hi = share(len(kinds), pp_rank, self.pp)
        return [
            kind.spec(
                f"layers.{i}",
                (tp_rank, self.tp),
                self._states(kinds, kind),
                in_sections=self.in_sections,
            )
            for i, kind in enumerate(kinds)
            if lo <= i < hi
        ]

    def _states(self, kinds: tuple[Kind, ...], kind: Kind) -> int:
        step = np.lcm.reduce([k.state_tokens for k in kinds if k.retention == kind.retention])
        return int(step) * self.states.get(kind.retention, 1) // kind.state_tokens

    def layout(
        self, kinds: tuple[Kind, ...], tp_rank: int, pp_rank: int, num_tokens: int
    ) -> Layout:
        """One rank's layout, with room for a request of `num_tokens` and some more."""
        groups = grouped(self.layers(kinds, tp_rank, pp_rank))
        site = Site(
            model="random",
            order=self.order,
            tp=(tp_rank, self.tp),
            pp=(pp_rank, self.pp),
            alignment=self.alignment,
        )
        pack = PACKS[self.pack]
        small = pack(groups, num_slabs=2, site=site)
        slabs = 2 + sum(
            -(-blocks_of(rows.group, num_tokens) // rows.rows_per_slab) for rows in small.groups
        )
        return pack(groups, num_slabs=slabs, site=site)


def blocks_of(group: Group, num_tokens: int) -> int:
    match group.retention:
        case State():
            return 1
        case Encoder(tokens):
            return -(-tokens // group.block_tokens)
        case _:
            return -(-num_tokens // group.block_tokens)


SIZES = st.sampled_from([1, 2, 2, 3, 4, 6, 8])
TP = st.sampled_from([1, 2, 3, 4, 6, 8])
RETENTIONS = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(1, 12)),
    st.builds(Chunk, st.integers(1, 12)),
    st.builds(Encoder, st.integers(1, 9)),
)
DTYPES = st.sampled_from([DType.BFLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3, DType.INT4])


@st.composite
def kinds(draw: st.DrawFn, retention: Retention) -> Kind:
    shape = draw(st.sampled_from(["kv", "kv", "scaled", "latent", "recurrent"]))
    align = draw(st.sampled_from([1, 1, 4, 12]))
    if shape == "recurrent":
        parts = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
        return Kind(State(), draw(SIZES), (), parts=parts, align=align)
    dtype = draw(DTYPES)
    size = 2 * draw(st.sampled_from([1, 2, 3]))
    fields = [("k", dtype, size), ("v", dtype, size)]
    if shape == "scaled":
        fields += [("k_scale", DType.FLOAT32, 1), ("v_scale", DType.UINT8, 1)]
        sections = draw(st.sampled_from([(), (0, 0, 1, 1), (0, 1, 1, 2), (0, 1, 2, 3)]))
        return Kind(retention, draw(SIZES), tuple(fields), align=align, sections=sections)
    if shape == "latent":
        state_tokens = draw(st.sampled_from([1, 1, 2, 4]))
        return Kind(retention, 1, (("latent", dtype, size),), state_tokens, align=align)
    return Kind(retention, draw(SIZES), tuple(fields), align=align)


@st.composite
def models(draw: st.DrawFn, *, most_layers: int = 5) -> tuple[Kind, ...]:
    retentions = draw(st.lists(RETENTIONS, min_size=1, max_size=2, unique=True))
    found: list[Kind] = []
    while len(found) < most_layers and (not found or draw(st.booleans())):
        if found and draw(st.booleans()):
            found.append(found[-1])
        else:
            found.append(draw(kinds(draw(st.sampled_from(retentions)))))
    return tuple(found)


ALIGNMENTS = st.builds(
    Alignment,
    page=st.sampled_from([1, 4, 16]),
    row=st.sampled_from([1, 8, 64]),
    base=st.just(64),
)


@st.composite
def served(
    draw: st.DrawFn,
    model: tuple[Kind, ...],
    *,
    tps: st.SearchStrategy[int] = TP,
    most_tokens: int = 64,
) -> Served:
    tokens = st.one_of(st.sampled_from([1, 2, 3, 4]), st.integers(1, most_tokens))
    return Served(
        tp=draw(tps),
        pp=draw(st.integers(1, min(4, len(model)))),
        states={kind.retention: draw(tokens) for kind in model},
        order=draw(st.sampled_from(ORDERS)),
        pack=draw(st.sampled_from(sorted(PACKS))),
        alignment=draw(ALIGNMENTS),
        in_sections=draw(st.booleans()),
    )


# ── requests ──────────────────────────────────────────────────────────────────────────


def first_block(group: Group, num_tokens: int, spare: int) -> int:
    """The first logical block that a windowed group lists, `spare` more than it needs."""
    match group.retention:
        case Window(tokens):
            first = max(0, num_tokens - tokens + 1)
        case Chunk(tokens):
            first = num_tokens - num_tokens % tokens
        case _:
            first = 0
    return max(0, min(first, max(0, num_tokens - 1)) // group.block_tokens - spare)


@st.composite
def listed(draw: st.DrawFn, layout: Layout, num_tokens: int) -> dict[int, Blocks]:
    """Blocks for a request: slabs dealt to groups, ids in them mixed or in order."""
    found: dict[int, Blocks] = {}
    random = draw(st.randoms(use_true_random=False))
    for members in layout.sharing:
        slabs = list(range(1, layout.num_slabs))
        if draw(st.booleans()):
            random.shuffle(slabs)
        for g in members:
            rows = layout.groups[g]
            count = blocks_of(rows.group, num_tokens)
            need = -(-count // rows.rows_per_slab)
            mine, slabs = (slabs[:need], slabs[need:]) if len(members) > 1 else (slabs, slabs)
            ids = [s * rows.rows_per_slab + r for s in mine for r in range(rows.rows_per_slab)]
            if draw(st.booleans()):
                random.shuffle(ids)
            index = np.arange(count, dtype=np.int64)
            keep = index >= first_block(rows.group, num_tokens, draw(st.integers(0, 2)))
            found[g] = Blocks(np.array(ids[:count], np.int64)[keep], index[keep])
    return found


# ── the oracle ────────────────────────────────────────────────────────────────────────

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def coordinates(extent: Extent, per_unit: int = 1) -> Ints:
    """Of each unit held, its place on the whole axis."""
    return np.concatenate(
        [np.arange(lo // per_unit, hi // per_unit, dtype=np.int64) for lo, hi in extent.pieces]
    )


def field_bytes(
    layout: Layout, layer: str, name: str, block: int, logical: int
) -> tuple[Ints, Ints, Ints]:
    """Of each byte of a field in one block: where it lies, what it is, its global state.

    What it is: one number for (field, head, place in the whole field, state).
    """
    _, spec, place = layout.layers[layer]
    field = spec.field(name)
    axes = [(spec.heads.total, coordinates(spec.heads))]
    for k, extent in enumerate(field.axes):
        per_unit = field.dtype.per_unit if k == len(field.axes) - 1 else 1
        axes.append((extent.total // per_unit, coordinates(extent, per_unit)))
    axes.append((field.dtype.unit, np.arange(field.dtype.unit)))
    number = np.array(0, np.int64)
    for total, places in axes:
        number = number[..., None] * total + places
    states = logical * spec.states + np.arange(spec.states)
    which = sorted(f.name for f in spec.fields).index(name)
    number = (which << 56) + number[..., None] * (1 << 20) + states
    inside = np.arange(number[0].size // spec.states)  # row by row, nothing between
    offset, head_stride, token_stride = section_numbers(place, field.section)
    start = offset + block * place[0].block_stride + _start_of(spec, name)
    heads = np.arange(len(axes[0][1])) * head_stride
    slots = np.arange(spec.states) * token_stride
    address = start + heads[:, None, None] + inside[:, None] + slots
    state = np.broadcast_to(states, address.shape)
    return address.ravel(), number.ravel(), state.ravel()


def _start_of(spec: LayerSpec, name: str) -> int:
    """Where a field starts in its cell: after those before it, at a multiple of its unit."""
    end = 0
    section = spec.field(name).section
    for field in (each for each in spec.fields if each.section == section):
        end += -end % field.dtype.unit
        if field.name == name:
            return end
        end += field.dtype.bits * int(np.prod([axis.size for axis in field.axes])) // 8
    raise KeyError(name)


@dataclass(frozen=True)
class Bytes:
    """Bytes of a request in one group: where, which layer, what, and of which tokens."""

    address: Ints
    layer: Ints
    number: Ints
    first_token: Ints
    end_token: Ints

    def __getitem__(self, which: object) -> "Bytes":
        return Bytes(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def group_bytes(layout: Layout, group: int, blocks: Blocks) -> Bytes:
    """Every field byte of the listed blocks."""
    rows: list[tuple[Ints, ...]] = []
    for spec in layout.groups[group].group.layers:
        span = 1 if isinstance(spec.retention, State) else spec.block_tokens // spec.states
        for field in spec.fields:
            for block, logical in zip(blocks.ids.tolist(), blocks.index.tolist(), strict=True):
                address, number, state = field_bytes(layout, spec.name, field.name, block, logical)
                layer = np.full(len(address), int(spec.name.split(".")[1]), np.int64)
                rows.append((address, layer, number, state * span, (state + 1) * span))
    if not rows:
        return Bytes(*(np.empty(0, np.int64) for _ in range(5)))
    return Bytes(*(np.concatenate(column) for column in zip(*rows, strict=True)))


def value(layer: Ints, number: Ints) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """What a logical byte contains: a function of what it is."""
    mixed = (number.astype(np.uint64) * np.uint64(131) + layer.astype(np.uint64)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    return (mixed >> np.uint64(56)).astype(np.uint8)


Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


class Users:
    """Which block of each group uses each byte of an arena, by listing every block."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.blocks = [self._blocks(g) for g in range(len(layout.groups))]
        self.partners = self._partners()

    def _blocks(self, group: int) -> Ints:
        found = np.full(self.layout.nbytes, -1, np.int64)
        ids = np.arange(self.layout.num_slabs * self.layout.groups[group].rows_per_slab)
        rows = self.layout.groups[group]
        for spec, place in zip(rows.group.layers, rows.placements, strict=True):
            for field in spec.fields:
                address, _, _ = field_bytes(self.layout, spec.name, field.name, 0, 0)
                for block in ids.tolist():
                    mine = address + block * place[0].block_stride
                    assert (found[mine] == -1).all()
                    found[mine] = block
        for spec, place in zip(rows.group.layers, rows.placements, strict=True):
            for part, at in zip(spec.sections, place, strict=True):
                heads, states, cell = np.ogrid[: part.heads.size, : part.states, : part.cell_bytes]
                address = at.offset + heads * at.head_stride + states * at.token_stride + cell
                for block in ids.tolist():
                    mine = address + block * at.block_stride
                    assert np.isin(found[mine], (-1, block)).all()
                    found[mine] = block
        return found

    def _partners(self) -> list[set[int]]:
        """Groups that have bytes in common, directly or through others."""
        found = [{g} for g in range(len(self.blocks))]
        for g, h in combinations(range(len(self.blocks)), 2):
            if ((self.blocks[g] >= 0) & (self.blocks[h] >= 0)).any():
                both = found[g] | found[h]
                for member in both:
                    found[member] = both
        return found

    def own(self, group: int, blocks: Blocks) -> Flags:
        """Whether each byte is a cell's in the listed blocks, or lies between two such bytes
        with nothing between them that another block can use at the same time."""
        mine = np.isin(self.blocks[group], blocks.ids)
        slabs = np.unique(blocks.ids // self.layout.groups[group].rows_per_slab)
        theirs = (self.blocks[group] >= 0) & ~mine
        for g, users in enumerate(self.blocks):
            if g != group:
                slab = users // self.layout.groups[g].rows_per_slab
                never = np.isin(slab, slabs) & (g in self.partners[group])
                theirs |= (users >= 0) & ~never
        used, every = mine | theirs, np.arange(len(mine))
        before = np.maximum.accumulate(np.where(used, every, -1))
        after = np.minimum.accumulate(np.where(used, every, len(mine))[::-1])[::-1]
        ends = np.append(mine, False)  # nothing lies before the first byte or after the last one
        return ends[before] & ends[after] & ~theirs


def own_bytes(layout: Layout, group: int, blocks: Blocks) -> Flags:
    """Per byte of the arena, whether a copy of the listed blocks may touch it."""
    return _users(layout).own(group, blocks)


@lru_cache(maxsize=2)
def _users(layout: Layout) -> Users:
    return Users(layout)
