"""Rows of a CUDA arena through a pinned host tier; needs only numpy and torch."""

import numpy as np
import torch

from kvstow.memory.arena import Arena
from kvstow.offload.copies.mover import Limits, Mover
from kvstow.offload.host.tier import HostTier
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec


def layout_of(order, num_slabs=64):
    content = (Extent.whole("content", 64),)
    fields = (Field("k", DType.BFLOAT16, content), Field("v", DType.BFLOAT16, content))
    layers = [
        LayerSpec(
            name=f"l.{i}",
            retention=Window(32) if i % 2 else Full(),
            block_tokens=16,
            states=16,
            heads=Extent.whole("head", 4),
            fields=fields,
        )
        for i in range(6)
    ]
    return packed(grouped(layers), num_slabs=num_slabs, site=Site(model="m", order=order))


def filled(layout):
    arena = Arena(layout, device="cuda")
    dice = torch.Generator(device="cuda").manual_seed(3)
    arena.bytes.random_(0, 256, generator=dice)
    return arena


def rows_of(layout, group, count, start=0):
    first = layout.groups[group].rows_per_slab + start
    return np.arange(first, first + count)


def pages(arena, group, ids):
    where = torch.as_tensor(ids, device="cuda")
    return [
        arena.tensor(layer.name)[where].view(torch.uint8).cpu()
        for layer in arena.layout.groups[group].group.layers
    ]


def test_device_rows_come_back_byte_for_byte_in_every_order():
    for order in ("BLHNC", "BLNHC", "BHLNC", "LBHNC", "LBNHC", "LHBNC"):
        layout = layout_of(order)
        arena = filled(layout)
        host = HostTier(layout, capacity=32 << 20)
        assert host.arena.pinned
        mover = Mover(arena, host)
        for group in range(len(layout.groups)):
            ids = rows_of(layout, group, 9)[::-1].copy()
            keys = [f"{group}/{i}".encode() for i in ids]
            before = pages(arena, group, ids)
            assert mover.store(group, ids, keys).result(60).all()
            arena.zero(group, ids)
            assert mover.load(group, keys, ids).result(60).all()
            for a, b in zip(before, pages(arena, group, ids), strict=True):
                assert torch.equal(a, b), order
        mover.close()
        host.check()


def test_a_store_waits_for_the_kernels_that_were_submitted_before_it():
    layout = layout_of("BLHNC")
    arena = filled(layout)
    mover = Mover(arena, HostTier(layout, capacity=32 << 20))
    ids = rows_of(layout, 0, 4)
    where = torch.as_tensor(ids, device="cuda")
    big = torch.randn(6000, 6000, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(20):
            big = big @ big
            big = big / big.norm()
        arena.tensor("l.2")[where] = 1.5
        job = mover.store(0, ids, [b"0", b"1", b"2", b"3"])
    assert job.result(60).all()
    arena.zero(0, ids)
    assert mover.load(0, [b"0", b"1", b"2", b"3"], ids).result(60).all()
    assert (arena.tensor("l.2")[where] == 1.5).all().item()
    mover.close()


def test_stores_and_loads_at_once_do_not_mix_rows():
    layout = layout_of("BLHNC", num_slabs=400)
    arena = filled(layout)
    mover = Mover(
        arena, HostTier(layout, capacity=64 << 20), limits=Limits(workers=4, part_bytes=1 << 20)
    )
    sources, targets = rows_of(layout, 0, 100), rows_of(layout, 0, 100, start=100)
    keys = [str(i).encode() for i in range(100)]
    before = pages(arena, 0, sources)
    assert mover.store(0, sources, keys).result(60).all()
    jobs = []
    for n in range(5):
        part = slice(20 * n, 20 * n + 20)
        jobs.append(mover.load(0, keys[part], targets[part]))
        again = [b"again" + key for key in keys[part]]
        jobs.append(mover.store(0, sources[part], again))
    assert all(job.result(60).all() for job in jobs)
    for a, b in zip(before, pages(arena, 0, targets), strict=True):
        assert torch.equal(a, b)
    mover.close()


def test_a_store_that_waits_for_compute_does_not_hold_up_a_load():
    layout = layout_of("BLHNC")
    arena = filled(layout)
    mover = Mover(arena, HostTier(layout, capacity=32 << 20))
    ids, keys = rows_of(layout, 0, 4), [b"0", b"1", b"2", b"3"]
    before = pages(arena, 0, ids)
    assert mover.store(0, ids, keys).result(60).all()
    assert mover.load(0, keys, rows_of(layout, 0, 4, start=4)).result(60).all()  # all is compiled
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(4_000_000_000)  # some seconds
        held_up = mover.store(0, ids, [b"again" + key for key in keys])
    there = rows_of(layout, 0, 4, start=8)
    assert mover.load(0, keys, there).result(60).all()
    assert not held_up.over
    for a, b in zip(before, pages(arena, 0, there), strict=True):
        assert torch.equal(a, b)
    assert held_up.result(60).all()
    mover.close()
