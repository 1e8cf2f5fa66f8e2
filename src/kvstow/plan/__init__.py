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
"""
