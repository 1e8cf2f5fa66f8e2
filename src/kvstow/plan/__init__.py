"""Planning: a model's layers become a layout. Integers in, integers out; no memory, no torch.

In the order in which they are read:

    view        strided bytes: Axis, View, Run
    retention   what the next token sees: Full, Window, Chunk, State, Encoder
    spec        what a layer keeps: DType, Extent, Field, LayerSpec
    group       layers that share one block table
    layout      where every byte lies; a layout that breaks a law cannot be built
    sharing     the sharing law, decided exactly
    slab        how many rows of each group make a slab
    pack        groups and a budget → layout: packed, union, separate; alignments
    models      config.json or catalogue name → the layers of one rank
    identity    which computation made the bytes
    checkpoint  what decides a checkpoint's computation: configuration, code, tokenizer, weights
    manifest    a layout as a document, and its fingerprint
    sizing      plan_model: all ranks of a model; what requests cost, how many fit on GPUs

`plan_model` and `Plan` are in `sizing.plan`, `encode`, `decode` and `fingerprint` in
`manifest`: they load more than the rest needs.
"""

from kvstow.plan.group import Group, grouped
from kvstow.plan.layout import ORDERS, Layout, Order, PlacedGroup, Placement, parse_order
from kvstow.plan.pack import Alignment, Demand, Packing, Site, packed, packed_as, separate, union
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, State, Window
from kvstow.plan.sizing.capacity import max_requests, max_tokens, request_bytes
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.plan.view import Axis, Ints, Run, View, parse_size

__all__ = [
    "ORDERS",
    "Alignment",
    "Axis",
    "Chunk",
    "DType",
    "Demand",
    "Encoder",
    "Extent",
    "Field",
    "Full",
    "Group",
    "Ints",
    "LayerSpec",
    "Layout",
    "Order",
    "Packing",
    "PlacedGroup",
    "Placement",
    "Retention",
    "Run",
    "Site",
    "State",
    "View",
    "Window",
    "grouped",
    "max_requests",
    "max_tokens",
    "packed",
    "packed_as",
    "parse_order",
    "parse_size",
    "request_bytes",
    "separate",
    "union",
]
