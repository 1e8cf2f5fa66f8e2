"""Pages of host pools as bytes. The pools here have SGLang's methods and memory of their own;
test_backend.py has SGLang's."""

from typing import Any

import numpy as np
import pytest
import torch

from kvstow.adapters.sglang import pages as module
from kvstow.adapters.sglang.pages import HostPages
from kvstow.errors import SpecError

CANARY = 0xA5
TOKENS, PAGES = 2, 6


class Pool:
    """`pieces` buffers; a page is one row of each."""

    layout = "page_first"
    page_size = TOKENS

    def __init__(self, *sizes: int) -> None:
        self.buffers = [torch.full((PAGES, size), CANARY, dtype=torch.uint8) for size in sizes]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
        numbers = [i // TOKENS for i in indices.tolist()[::TOKENS]]
        rows = [buffer[number] for number in numbers for buffer in self.buffers]
        return [row.data_ptr() for row in rows], [row.nbytes for row in rows]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.cat([buffer[index // TOKENS] for buffer in self.buffers])

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        sizes = [buffer.shape[1] for buffer in self.buffers]
        for buffer, part in zip(self.buffers, data_page.split(sizes), strict=True):
            buffer[index // TOKENS] = part


class Numbers(Pool):
    """Only numbers pages, as the anchor of DeepSeek-V4 does."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        return None

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


class Opaque(Pool):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
        raise ValueError("no addresses")

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        raise NotImplementedError("no pages")


def indices(*numbers: int) -> torch.Tensor:
    return torch.cat([torch.arange(TOKENS * n, TOKENS * (n + 1)) for n in numbers])


@pytest.mark.parametrize(
    ("sizes", "is_in_place"), [((1,), True), ((8, 3), True), ((2,) * 5, False)]
)
def test_pages_of_few_pieces_are_used_in_place_and_others_gathered(sizes, is_in_place):
    pool = Pool(*sizes)
    pages = HostPages("kv", pool, rank="0")
    assert pages.is_in_place == is_in_place
    assert pages.sizes == (sizes if is_in_place else (sum(sizes),))
    starts = pages.starts(2, indices(4, 1))
    assert starts == [4 * TOKENS, TOKENS]
    room = pages.room(starts)
    for k, row in enumerate(room):
        row[:] = k + 1
    found = np.array([True, False])
    pages.deliver(starts, room, found)
    written = [4, 1] if is_in_place else [4]
    for buffer in pool.buffers:
        for number in range(PAGES):
            assert (buffer[number] != CANARY).all() == (number in written)
    again = pages.read(starts[:1])
    assert [row.tolist() for row in again] == [row.tolist() for row in room[: len(again)]]


def test_gathered_pages_come_in_lots(monkeypatch):
    monkeypatch.setattr(module, "GATHER_BYTES", 25)
    gathered = HostPages("kv", Pool(*(2,) * 5), rank="0")
    assert list(gathered.lots(5)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(HostPages("kv", Pool(100), rank="0").lots(5)) == [slice(0, 5)]
    assert list(gathered.lots(0)) == []


def test_a_pool_without_bytes_has_pages_of_one_byte():
    pages = HostPages("kv", Numbers(4), rank="0")
    assert pages.sizes == (1,)
    assert [row.nbytes for row in pages.read([0, 2])] == [1, 1]


def test_a_pool_that_can_neither_be_addressed_nor_copied_is_refused():
    with pytest.raises(SpecError, match="Opaque in layout 'page_first'"):
        HostPages("kv", Opaque(4), rank="0")


@pytest.mark.parametrize(
    "wrong",
    [None, indices(0), indices(0, 1)[1:], torch.tensor([1, 2, 3, 4]), torch.arange(0, 8, 2)],
)
def test_indices_that_are_not_whole_pages_are_refused(wrong):
    with pytest.raises(SpecError, match="2 "):
        HostPages("kv", Pool(4), rank="0").starts(2, wrong)


def test_no_two_pages_have_a_name_in_common():
    pools = [
        HostPages("kv", Pool(4), rank="0"),
        HostPages("kv", Pool(4), rank="1"),
        HostPages("swa", Pool(4), rank="0"),
        HostPages("kv", Pool(2, 2), rank="0"),
        HostPages("kv", Pool(4), rank="0", in_place=False),
    ]
    names = [name for pages in pools for name in pages.names(["a", "b"])]
    assert len(set(names)) == len(names) == 2 * 6


def test_a_page_has_a_name_of_its_own_for_every_dtype_and_number_of_heads():
    first, second, third = Pool(4), Pool(4), Pool(4)
    second.dtype, third.head_num = torch.float16, 3
    names = {HostPages("kv", pool, rank="0").names(["a"])[0] for pool in (first, second, third)}
    assert len(names) == 3


def test_flat_pages_are_taken_as_they_are_or_refused():
    gathered = HostPages("kv", Pool(4, 4), rank="0", in_place=False)
    page = torch.zeros(4, dtype=torch.bfloat16)
    gathered.flat(page)[:] = 1
    assert (page.view(torch.uint8) == 1).all()
    for wrong in (None, torch.zeros(7, dtype=torch.uint8), torch.zeros(16)[::8]):
        with pytest.raises(SpecError):
            gathered.flat(wrong)
    with pytest.raises(SpecError, match="interface_v1"):
        HostPages("kv", Pool(4), rank="0").flat(torch.zeros(4, dtype=torch.uint8))


def test_pages_are_there_if_all_their_pieces_are():
    pages = HostPages("kv", Pool(4, 4), rank="0")
    assert pages.whole(np.array([1, 1, 1, 0, 0, 0], bool)).tolist() == [True, False, False]
    assert pages.whole(np.zeros(0, bool)).tolist() == []
