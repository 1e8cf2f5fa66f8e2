"""Copies on a device: what the gather kernel is given, in Triton's interpreter where there is no
device, and batches that grow."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvstow.memory import cuda
from kvstow.memory.arena import Arena
from kvstow.memory.cuda import (
    GROWTH,
    OPENING,
    compile_copies,
    gather,
    launch_grids,
    rounds,
    word_bytes,
)
from kvstow.memory.kernels import copy as kernels
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import Alignment, Site, packed
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.route import plan_route
from kvstow.route.sources import sources
from patterns import fill, pattern
from planning import attention
from strategies import group_bytes, listed, models, served


def flat(num_slabs: int = 8, order: str = "BLHNC") -> Layout:
    layers = [attention(f"l.{i}", heads=2, dim=8, tokens=4) for i in range(2)]
    site = Site(order=order, alignment=Alignment(page=1, row=1, base=64))
    return packed(grouped(layers), num_slabs=num_slabs, site=site)


def copies_of(*triples: tuple[int, int, int]) -> Copies:
    return Copies(*np.array(triples, np.int64).reshape(-1, 3).T)


def triples(copies: Copies) -> list[tuple[int, int, int]]:
    columns = copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist()
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("step", [1, 2, 4, 8, 16])
def test_the_gather_kernel_copies_the_same_bytes_at_every_word_length(step):
    rng = np.random.default_rng(step)
    source, destination = (
        torch.zeros(4096 + 64, dtype=torch.uint8),
        torch.zeros(4160, dtype=torch.uint8),
    )
    source = source[-source.data_ptr() % 64 :][:4096]
    destination = destination[-destination.data_ptr() % 64 :][:4096]
    source.copy_(torch.from_numpy(pattern(4096, 1)))
    destination.copy_(torch.from_numpy(pattern(4096, 2)))
    expected = destination.clone()
    places = np.sort(rng.permutation(4096 // step)[:8]) * step
    sizes = np.minimum(np.diff(np.append(places, 4096)), 40 * step)
    copies = Copies(rng.integers(0, (4096 - sizes.max()) // step, 8) * step, places, sizes)
    assert word_bytes(source.data_ptr(), copies.source, places, sizes) >= step
    for start, place, size in triples(copies):
        expected[place : place + size] = source[start : start + size]
    gather(source, destination, copies)
    assert torch.equal(destination, expected)


def test_the_gather_kernel_shares_long_copies_and_cuts_uneven_ones():
    source, destination = torch.zeros(1 << 19, dtype=torch.uint8), torch.zeros(1 << 19).byte()
    source.copy_(torch.from_numpy(pattern(1 << 19, 1)))
    lengths = [300_000, 64, 64, 64, 64, 70_000]
    copies = copies_of(
        *(
            (100_000 - 64 * i, 1024 + sum(lengths[:i]) + 64 * i, length)
            for i, length in enumerate(lengths)
        )
    )
    expected = destination.clone()
    for start, place, size in triples(copies):
        expected[place : place + size] = source[start : start + size]
    gather(source, destination, copies)
    assert torch.equal(destination, expected)


def test_a_copy_of_more_bytes_than_a_kernel_counts_in_32_bits_is_cut():
    nowhere = torch.empty(1 << 34, dtype=torch.uint8, device="meta")
    with mock.patch.object(kernels, "copy_lanes") as run:
        gather(nowhere, nowhere, copies_of((0, 0, 1 << 34)))
    lanes, word = run.call_args.args[3:]
    assert (lanes[2].max() * word, lanes[2].sum() * word) == (1 << 30, 1 << 34)
    assert run.call_args.kwargs["longest"] == 1 << 30


@pytest.mark.parametrize("how", ["grids", "kernel", "plain"])
def test_what_could_not_be_submitted_whole_is_not_under_way_when_that_is_raised(how):
    """Nobody gets a handle to wait on, and its rows are taken to be quiet."""
    layout, blocks = flat(), {0: Blocks.first([1, 2])}
    route, arena, device = plan_route(layout, layout), Arena(layout), mock.MagicMock()
    submitted = mock.Mock(side_effect=[(), RuntimeError("out of memory")])
    if how == "grids":
        call = partial(cuda.start_grids, arena, arena, 2 * route.grids(blocks, blocks, 8), 8)
    else:
        submitted()  # as the first of several copies
        call = partial(cuda.start, arena, arena, route.copies(blocks, blocks, 8), how, None)
    where = {
        "grids": (kernels, "copy_lanes"),
        "kernel": (cuda, "gather"),
        "plain": (cuda, "one_by_one"),
    }
    with (
        mock.patch.object(Arena, "device", torch.device("cuda")),
        mock.patch.object(torch, "cuda", device),
        mock.patch.object(*where[how], submitted),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        call()
    assert submitted.call_count == 2
    device.Stream.return_value.synchronize.assert_called_once_with()


def test_lanes_are_kept_until_a_copy_is_over_by_whoever_copies_along_them():
    """What is kept for later copies may make room for others meanwhile, and another stream could
    write there."""
    arena = Arena(flat())
    blocks = {0: Blocks.first([1])}
    (grid,) = plan_route(arena.layout, arena.layout).grids(blocks, blocks, 4)
    with mock.patch.object(kernels, "copy_lanes") as run:
        kept = launch_grids(arena.bytes, arena.bytes, [grid])
    pairs, lanes = run.call_args.args[2:4]
    assert {each.data_ptr() for each in kept} == {pairs.data_ptr(), lanes.data_ptr()}


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ((16, "BLHNC"), (16, "BLHNC")),
        ((16, "BLHNC"), (64, "BLHNC")),
        ((64, "BLHNC"), (16, "BHLNC")),
        ((8, "BLNHC"), (4, "LBHNC")),
        ((1, "BLHNC"), (16, "BLNHC")),
    ],
)
def test_the_kernel_copies_what_a_route_has_not_written_out(here, there):
    """Beside the same route, written out and copied byte by byte."""
    num_tokens = 3 * max(here[0], there[0]) - 1
    layouts = [
        packed(
            grouped([attention(f"l.{i}", heads=2, dim=8, tokens=tokens) for i in range(3)]),
            num_slabs=num_tokens // tokens + 4,
            site=Site(order=order),
        )
        for tokens, order in (here, there)
    ]
    source, destination, expected = Arena(layouts[0]), Arena(layouts[1]), Arena(layouts[1])
    fill(source, 1)
    fill(destination, 2)
    fill(expected, 2)
    blocks = [
        {
            0: Blocks.first(
                rng.permutation(np.arange(1, layout.num_blocks(0)))[: -(-num_tokens // t)]
            )
        }
        for rng, layout, (t, _) in zip(
            map(np.random.default_rng, (1, 2)), layouts, (here, there), strict=True
        )
    ]
    route = plan_route(*layouts)
    for start, place, size in triples(route.copies(*blocks, num_tokens)):
        expected.bytes[place : place + size] = source.bytes[start : start + size]
    grids = route.grids(*blocks, num_tokens)
    launch_grids(source.bytes, destination.bytes, grids)
    launch_grids(source.bytes, destination.bytes, grids, programs=3)  # its lanes are kept
    assert torch.equal(destination.bytes, expected.bytes)


@settings(max_examples=examples(25))
@given(st.data())
def test_the_kernel_writes_no_byte_that_a_route_has_not_and_every_field_that_it_has(data):
    """Of any model, from any ranks, whole or from any token on. Written out, copies of neighbours
    run over the padding between them; the kernel leaves it as it was."""
    model, num_tokens = data.draw(models(most_layers=3)), data.draw(st.integers(1, 24))
    first = data.draw(st.integers(0, num_tokens))
    served_there, served_here = (
        data.draw(served(model, tps=st.sampled_from([1, 2]), most_tokens=8)) for _ in range(2)
    )
    layout = served_here.layout(model, 0, 0, num_tokens)
    ranks = [(t, p) for t in range(served_there.tp) for p in range(served_there.pp)]
    others = [served_there.layout(model, *rank, num_tokens) for rank in ranks]
    into = data.draw(listed(layout, num_tokens))
    fields = np.concatenate([group_bytes(layout, g, into[g]).address for g in into])
    with Arena(layout) as destination:
        fill(destination, 1)
        for part in sources(others, layout):
            with Arena(others[part.index]) as source:
                fill(source, 2 + part.index)
                blocks = data.draw(listed(source.layout, num_tokens))
                asks = blocks, into, num_tokens
                copies = part.route.copies(*asks, start_token=first)
                before = destination.bytes.numpy().copy()
                written = before.copy()
                for start, place, size in triples(copies):
                    written[place : place + size] = source.bytes.numpy()[start : start + size]
                grids = part.route.grids(*asks, start_token=first)
                launch_grids(source.bytes, destination.bytes, grids, programs=3)
                after = destination.bytes.numpy()
                assert ((after == written) | (after == before)).all()
                assert (after[fields] == written[fields]).all()


def test_the_gather_kernel_is_compiled_for_words_and_for_no_number_of_copies():
    kernel = kernels._copy_lanes
    asked = getattr(kernel, "kwargs", None) or vars(
        kernel
    )  # as the interpreter, or a device has it
    assert set(asked["do_not_specialize"]) == {"num_pairs", "num_lanes", "num_units", "tiles"}
    arena = Arena(flat())
    with mock.patch.object(kernels, "copy_lanes") as run:
        compile_copies(arena.bytes, arena.layout)
    assert {call.args[4] for call in run.call_args_list} == {16}
    assert {call.kwargs["width"] for call in run.call_args_list} == set(kernels.WIDTHS)
    compile_copies(arena.bytes, arena.layout)  # and really


@given(st.integers(0, 5000))
def test_batches_are_all_of_the_copies_in_order_and_the_first_is_small(count):
    parts = list(rounds(count))
    assert [i for low, high in parts for i in range(low, high)] == list(range(count))
    assert all(low < high for low, high in parts)
    assert all(high - low <= OPENING * GROWTH**i for i, (low, high) in enumerate(parts))


@pytest.mark.parametrize(
    ("numbers", "word"),
    [
        ((0, 0, 64), 16),
        ((16, 32, 48), 16),
        ((8, 0, 16), 8),
        ((4, 0, 16), 4),
        ((0, 0, 6), 2),
        ((0, 3, 16), 1),
    ],
)
def test_a_word_divides_every_start_and_every_length(numbers, word):
    assert word_bytes(0, 4096, *map(np.array, numbers)) == word
