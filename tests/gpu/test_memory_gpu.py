"""Arenas, copies, digests and kernels on a CUDA device. Needs numpy, torch and triton only."""

import subprocess
import sys
from typing import Any

import numpy as np
import torch

from kvstow.errors import ArenaError, BlockError, CopyError
from kvstow.memory import cuda
from kvstow.memory.arena import Arena
from kvstow.memory.copy import block_copies, choose_method, copy
from kvstow.memory.digest import DigestOf, digest, prepared
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Alignment, Site, packed, separate
from kvstow.plan.retention import Full, Retention, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.route import plan_route
from kvstow.testing.attention import check_attention
from patterns import pattern

DEVICE = "cuda:0"
FULL = Full()
METHODS = ("plain", "batch", "kernel")


def layer(
    name: str,
    *,
    heads: int = 2,
    dim: int = 8,
    tokens: int = 4,
    dtype: DType = DType.BFLOAT16,
    retention: Retention = FULL,
) -> LayerSpec:
    content = (Extent.whole("content", dim),)
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=tokens,
        states=tokens,
        heads=Extent.whole("head", heads),
        fields=(Field("k", dtype, content), Field("v", dtype, content)),
    )


def recurrent(name: str) -> LayerSpec:
    conv = (Extent.whole("channel", 10), Extent.whole("tap", 3))
    ssm = (Extent.whole("row", 4), Extent.whole("state", 2))
    return LayerSpec(
        name=name,
        retention=State(),
        block_tokens=8,
        states=1,
        heads=Extent.whole("head", 1),
        fields=(Field("conv", DType.BFLOAT16, conv), Field("ssm", DType.FLOAT32, ssm)),
    )


def hybrid(order: str = "BLHNC", *, num_slabs: int = 12, **sizes: int) -> Layout:
    layers = [layer(f"l.{i}", **sizes) for i in range(3)]
    layers += [layer("w", retention=Window(8), **sizes), recurrent("m")]
    return packed(grouped(layers), num_slabs=num_slabs, site=Site(order=order))


def filled(layout: Layout, device: str, seed: int, *, pinned: bool = False) -> Arena:
    arena = Arena(layout, device=device, pinned=pinned)
    arena.bytes.copy_(torch.from_numpy(pattern(layout.nbytes, seed)))
    return arena


def expected(layout: Layout, moves: Copies) -> np.ndarray:
    after = pattern(layout.nbytes, 2)
    columns = moves.source.tolist(), moves.destination.tolist(), moves.nbytes.tolist()
    for source, place, size in zip(*columns, strict=True):
        after[place : place + size] = pattern(layout.nbytes, 1)[source : source + size]
    return after


def refuses(kind: type[Exception], text: str, act) -> None:
    message = ""
    try:
        act()
    except kind as error:
        message = str(error)
    assert text in message, message or f"{text!r} was not refused"


# ── arenas ────────────────────────────────────────────────────────────────────────────


def test_a_device_arena_is_zeroed_aligned_and_as_long_as_planned():
    for base in (64, 4096, 2 << 20):
        site = Site(alignment=Alignment(base=base))
        layout = packed(grouped([layer("l")]), num_slabs=5, site=site)
        with Arena(layout, device=DEVICE) as arena:
            assert arena.address % layout.base_align == 0
            assert arena.bytes.numel() == layout.nbytes
            assert not arena.bytes.any()
            assert arena.device == torch.device(DEVICE)


def test_views_of_every_order_lie_at_the_planned_addresses_on_the_device():
    for order in ORDERS:
        layout = hybrid(order)
        with Arena(layout, device=DEVICE) as arena:
            before = torch.cuda.memory_allocated()
            for name, (_, spec, place) in layout.layers.items():
                view = arena.tensor(name)
                assert view.data_ptr() == arena.address + place[0].offset
                unit = view.element_size()
                assert [s * unit for s in view.stride()[:3]] == [
                    place[0].block_stride,
                    place[0].head_stride,
                    place[0].token_stride,
                ]
                arena.bytes.zero_()
                last = arena.field(name, spec.fields[-1].name)
                last[-1, -1, -1].view(torch.uint8).fill_(0x5A)
                memory = arena.bytes.cpu().numpy()
                start = layout.field(name, spec.fields[-1].name).end - spec.fields[-1].nbytes
                assert np.flatnonzero(memory).tolist() == list(
                    range(start, start + spec.fields[-1].nbytes)
                )
                del view, last
            assert torch.cuda.memory_allocated() == before


def test_zero_and_poison_change_exactly_the_owners_bytes_on_the_device():
    for order in ORDERS:
        layout = hybrid(order)
        with Arena(layout, device=DEVICE) as arena:
            for group in range(len(layout.groups)):
                ids = [1, layout.num_blocks(group) - 1]
                for value, fill in ((0, arena.zero), (0xFF, arena.poison)):
                    arena.bytes.fill_(0xA5)
                    fill(group, ids)
                    wanted = np.full(layout.nbytes, 0xA5, np.uint8)
                    for block in ids:
                        for run in layout.runs(group, block):
                            wanted[run.offset : run.end] = value
                    assert np.array_equal(arena.bytes.cpu().numpy(), wanted)
            beyond = [layout.num_blocks(0)]
            refuses(BlockError, "are not in", lambda a=arena, b=beyond: a.zero(0, b))


def test_pinned_memory_is_pinned_on_huge_pages_or_not():
    layout = hybrid()
    for kwargs in ({}, {"huge_pages": True}):
        with Arena(layout, pinned=True, **kwargs) as arena:
            assert arena.pinned
            arena.bytes.fill_(9)
            there = arena.bytes.to(DEVICE, non_blocking=True)
            torch.cuda.synchronize()
            assert bool((there == 9).all())
    with Arena(layout) as arena:
        assert not arena.pinned
    refuses(ArenaError, "not pinned", lambda: Arena(layout, device=DEVICE, pinned=True))


def test_engine_tensors_on_the_device_are_adopted_in_place():
    groups = grouped([layer(f"l.{i}") for i in range(3)])
    memory = torch.randn(3, 6, 4, 2, 16, device=DEVICE).bfloat16()
    tensors = {f"l.{i}": memory[i] for i in range(3)}
    axes = ("block", "token", "head", "content")
    site = Site(order="LBNHC", alignment=Alignment(base=64))
    layout = separate(groups, num_slabs=6, site=site)
    mine = packed(groups, num_slabs=9)
    here, there = {0: Blocks.first([4, 1])}, {0: Blocks.first([7, 3])}
    with Arena.adopt(layout, tensors, axes=axes) as engine, Arena(mine, device=DEVICE) as arena:
        assert torch.equal(engine.tensor("l.2"), tensors["l.2"].transpose(1, 2))
        copy(engine, arena, plan_route(layout, mine).copies(here, there, 8)).wait()
        assert torch.equal(arena.tensor("l.1")[7], tensors["l.1"][4].transpose(0, 1))
        assert digest(engine, here, 8) == digest(arena, there, 8)


# ── copies ────────────────────────────────────────────────────────────────────────────


def places(layout: Layout) -> list[tuple[Arena, Arena, tuple[str, ...]]]:
    """Source, destination and the methods that copy between them."""
    return [
        (filled(layout, DEVICE, 1), filled(layout, "cpu", 2, pinned=True), METHODS),
        (filled(layout, "cpu", 1, pinned=True), filled(layout, DEVICE, 2), METHODS),
        (filled(layout, DEVICE, 1), filled(layout, DEVICE, 2), METHODS),
        (filled(layout, DEVICE, 1), filled(layout, "cpu", 2), ("plain",)),
        (filled(layout, "cpu", 1), filled(layout, DEVICE, 2), ("plain",)),
    ]


def test_every_method_moves_scattered_rows_byte_for_byte_in_every_direction():
    for order in ("BLHNC", "LBNHC", "LHBNC"):
        layout = hybrid(order)
        rng = np.random.default_rng(0)
        moves = block_copies(layout, 0, rng.permutation(12)[:6], rng.permutation(12)[:6])
        for source, destination, methods in places(layout):
            for method in (*methods, "auto"):
                destination.bytes.copy_(torch.from_numpy(pattern(layout.nbytes, 2)))
                torch.cuda.synchronize()
                done = copy(source, destination, moves, method=method)
                done.wait()
                assert done.poll()
                found = destination.bytes.cpu().numpy()
                assert np.array_equal(found, expected(layout, moves)), (order, method)


def test_moves_of_any_alignment_and_length_are_byte_exact():
    layout = hybrid(num_slabs=64)
    rng = np.random.default_rng(1)
    for step in (1, 2, 4, 8, 16, 256):
        cuts = np.sort(rng.permutation(layout.nbytes // step)[:40]) * step
        size, place = (cuts[1::2] - cuts[::2]), cuts[::2]
        source = rng.integers(0, (layout.nbytes - size) // step + 1) * step
        moves = Copies(source, place, size)
        for a, b, methods in places(layout):
            for method in methods:
                b.bytes.copy_(torch.from_numpy(pattern(layout.nbytes, 2)))
                torch.cuda.synchronize()
                copy(a, b, moves, method=method).wait()
                found = b.bytes.cpu().numpy()
                assert np.array_equal(found, expected(layout, moves)), (step, method)


def test_a_copy_starts_after_the_work_that_the_current_stream_had_been_given():
    layout = packed(grouped([layer("l", heads=8, dim=128, tokens=16)]), num_slabs=256)
    moves = block_copies(layout, 0, np.arange(1, 200), np.arange(1, 200)[::-1])
    slow = torch.randn(4096, 4096, device=DEVICE)
    for method in METHODS:
        with Arena(layout, device=DEVICE) as a, Arena(layout, pinned=True) as b:
            for _ in range(20):
                slow = (slow @ slow).div_(64.0)
            a.bytes.fill_(7)  # after the products, in the same stream
            done = copy(a, b, moves, method=method)
            done.wait()
            rows = b.bytes.numpy()[layout.row_stride(0) : 200 * layout.row_stride(0)]
            assert (rows == 7).all(), method


def test_a_copy_does_not_block_the_host_and_can_be_polled_and_waited_for():
    layout = packed(grouped([layer("l", heads=8, dim=128, tokens=16)]), num_slabs=4096)
    moves = block_copies(layout, 0, np.arange(1, 4000), np.arange(1, 4000))
    with Arena(layout, device=DEVICE) as a, Arena(layout, device=DEVICE) as b:
        copy(a, b, moves).wait()  # the kernel is compiled here, while nothing waits
        a.bytes.fill_(3)
        waiting = torch.randn(8192, 8192, device=DEVICE)
        for _ in range(10):
            waiting = (waiting @ waiting).div_(90.0)
        done = copy(a, b, moves)
        early = done.poll()
        done.wait()
        seen = int(b.bytes[layout.row_stride(0) : 4000 * layout.row_stride(0)].min())
        assert not early
        assert seen == 3
        assert done.poll()


def test_a_given_stream_is_used_and_the_default_stream_takes_no_batch():
    layout = hybrid()
    moves = block_copies(layout, 0, [1], [2])
    a, b = filled(layout, DEVICE, 1), filled(layout, "cpu", 2, pinned=True)
    mine = torch.cuda.Stream(DEVICE)
    done = copy(a, b, moves, method="batch", stream=mine)
    assert done.work is not None
    assert done.work.stream == mine
    done.wait()
    default = torch.cuda.default_stream(DEVICE)
    refuses(CopyError, "default stream", lambda: copy(a, b, moves, method="batch", stream=default))


def test_moves_that_do_not_fit_are_refused_before_anything_is_copied():
    layout = hybrid()
    a, b = filled(layout, DEVICE, 1), filled(layout, "cpu", 2, pinned=True)
    bad = Copies(np.array([0, layout.nbytes - 1]), np.array([0, 64]), np.array([8, 2]))
    for method in METHODS:
        refuses(CopyError, "source bytes", lambda m=method: copy(a, b, bad, method=m))
    torch.cuda.synchronize()
    assert np.array_equal(b.bytes.numpy(), pattern(layout.nbytes, 2))
    refuses(
        CopyError,
        "does not copy",
        lambda: copy(a, b, block_copies(layout, 0, [1], [2]), method="memmove"),
    )


FAULT = """
import numpy as np, torch
from kvstow.errors import CopyError
from kvstow.memory import cuda
from kvstow.memory.arena import Arena
from kvstow.memory.copy import CopyHandle
from kvstow.route.copies import Copies
from kvstow.plan.group import grouped
from kvstow.plan.pack import packed
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.plan.retention import Full
spec = LayerSpec(name="l", retention=Full(), block_tokens=4, states=4,
                 heads=Extent.whole("head", 2),
                 fields=(Field("k", DType.BFLOAT16, (Extent.whole("c", 8),)),))
layout = packed(grouped([spec]), num_slabs=4)
a, b = Arena(layout, device="cuda:0"), Arena(layout, device="cuda:0")
bad = Copies(np.array([1 << 44]), np.array([0]), np.array([64]))
running = cuda.start(a, b, bad, "kernel", None)
try:
    CopyHandle(a, b, 1, 64, "kernel", running).wait()
except CopyError as error:
    assert "1 copies, 64 bytes" in str(error), error
    print("reported")
import os
os._exit(0)
"""


def test_an_error_on_the_device_is_reported_by_the_handle():
    run = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "reported", run.stdout + run.stderr


def test_the_choice_of_method_follows_length_and_pinning():
    layout = packed(grouped([layer("l", heads=8, dim=128, tokens=16)]), num_slabs=64)
    a = Arena(layout, device=DEVICE)
    pinned, plain = Arena(layout, pinned=True), Arena(layout)
    long, short = 1 << 20, 4096
    assert cuda.has_batch()
    assert choose_method(a, pinned, long) == "batch"
    assert choose_method(a, plain, long) == "plain"
    assert choose_method(a, a, long) == "kernel"
    assert choose_method(a, pinned, short) == "kernel"


def test_both_directions_at_once_are_byte_exact():
    layout = packed(grouped([layer("l", heads=8, dim=128, tokens=16)]), num_slabs=512)
    a = filled(layout, DEVICE, 1)
    b = filled(layout, "cpu", 2, pinned=True)
    out, back = Arena(layout, pinned=True), Arena(layout, device=DEVICE)
    moves = block_copies(layout, 0, np.arange(1, 500), np.arange(1, 500)[::-1])
    for method in METHODS:
        first, second = copy(a, out, moves, method=method), copy(b, back, moves, method=method)
        first.wait()
        second.wait()
        stride = layout.row_stride(0)
        for source, destination in ((a, out), (b, back)):
            rows = source.bytes.cpu().view(-1, stride)[1:500]
            assert torch.equal(destination.bytes.cpu().view(-1, stride)[1:500], rows.flip(0))
            destination.bytes.zero_()
        torch.cuda.synchronize()


# ── digests ───────────────────────────────────────────────────────────────────────────


def part_of(arena: Arena, blocks: dict[int, Blocks], num_tokens: int, **which: Any) -> int:
    return prepared(arena, [DigestOf(blocks, num_tokens, **which)])()[0]


def test_the_device_finds_the_hosts_digest_for_every_order_kind_length_and_head():
    rng = np.random.default_rng(2)
    for order in ORDERS:
        for sizes in (
            {},
            {"heads": 1, "dim": 5, "tokens": 1},
            {"heads": 3, "dim": 6, "tokens": 3},
            {"heads": 8, "dim": 128, "tokens": 16},
            {"heads": 2, "dim": 72, "tokens": 40},
            {"heads": 2, "dim": 7, "tokens": 2, "dtype": DType.FLOAT8_E4M3},
        ):
            layout = hybrid(order, num_slabs=16, **sizes)
            host = filled(layout, "cpu", 5)
            there = filled(layout, DEVICE, 5)
            tokens = layout.groups[0].group.block_tokens
            blocks = {}
            for group, rows in enumerate(layout.groups):
                count = 1 if isinstance(rows.group.retention, State) else 3
                ids = rng.permutation(layout.num_blocks(group) - 1)[:count] + 1
                blocks[group] = Blocks.first(ids)
            for num_tokens in (1, 2 * tokens, 3 * tokens - 1, 3 * tokens):
                whole = digest(host, blocks, num_tokens)
                assert whole == digest(there, blocks, num_tokens)
                parts = [part_of(there, blocks, num_tokens, heads=(i, i + 1)) for i in range(8)]
                assert parts == [
                    part_of(host, blocks, num_tokens, heads=(i, i + 1)) for i in range(8)
                ]
                assert sum(parts) % 2**64 == whole
                for which in (
                    {"every": 3, "phase": 1},
                    {"start_token": num_tokens // 2},
                    {"every": tokens, "heads": (0, 1), "layers": ["l.1"]},
                ):
                    assert part_of(there, blocks, num_tokens, **which) == part_of(
                        host, blocks, num_tokens, **which
                    )
            take = prepared(there, [DigestOf(blocks, 3 * tokens)])
            assert take() == take() == (digest(host, blocks, 3 * tokens),)
            there.field("l.1", "v")[blocks[0].ids[0], 0, 0].view(torch.uint8)[0] ^= 1
            assert digest(host, blocks, 1) != digest(there, blocks, 1)
            assert take() == (digest(there, blocks, 3 * tokens),)
            assert take() != (digest(host, blocks, 3 * tokens),)


# ── kernels ───────────────────────────────────────────────────────────────────────────


def test_the_paged_attention_kernel_honours_every_stride_on_the_device():
    from kvstow.memory.kernels.attention import paged_attention

    def paged(query, keys, values, table, lengths):
        rows = [
            paged_attention(
                query[i : i + 1, :, None], keys, values, table[i : i + 1], num_tokens=length
            )[0, 0]
            for i, length in enumerate(lengths.tolist())
        ]
        return torch.stack(rows)

    for order in ORDERS:
        for heads, tokens, dim, dtype in (
            (1, 1, 16, DType.BFLOAT16),
            (2, 2, 16, DType.BFLOAT16),
            (4, 4, 64, DType.FLOAT16),
            (8, 16, 128, DType.BFLOAT16),
            (8, 64, 128, DType.BFLOAT16),
        ):
            layers = [
                layer(f"l.{i}", heads=heads, tokens=tokens, dim=dim, dtype=dtype) for i in range(2)
            ]
            layout = packed(grouped(layers), num_slabs=24, site=Site(order=order))
            report = check_attention(paged, layout, device=DEVICE)
            assert report.ok, report


def test_torch_attention_over_gathered_blocks_honours_every_stride_on_the_device():
    def gathered(query, keys, values, table, lengths):
        rows = []
        for i, length in enumerate(lengths.tolist()):
            k, v = (
                x[table[i].long()].transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)[None]
                for x in (keys, values)
            )
            out = torch.nn.functional.scaled_dot_product_attention(
                query[i][None, :, None], k, v, enable_gqa=True
            )
            rows.append(out[0, :, 0])
        return torch.stack(rows)

    for order in ORDERS:
        layers = [layer(f"l.{i}", heads=2, tokens=4, dim=16) for i in range(2)]
        layout = packed(grouped(layers), num_slabs=24, site=Site(order=order))
        report = check_attention(gathered, layout, device=DEVICE)
        assert report.ok, report
