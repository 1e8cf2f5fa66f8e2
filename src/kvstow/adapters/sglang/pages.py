"""Pages of SGLang's host pools as bytes.

A page is what a pool keeps of `page_size` tokens, in all layers. In memory it is

    page_first, page_first_direct, page_head     K in one piece, V in another; one piece for MLA;
                                                 a recurrent state and its convolutions
    layer_first                                  a piece per layer, for K and for V

A page of few pieces is read and written in place: each piece is a chunk of the store. A page of
many pieces is gathered into one.
"""

import ctypes
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvstow.adapters.chunks import chunk_name
from kvstow.errors import SpecError
from kvstow.offload.tier import Bools, Bytes

MOST_PIECES = 4
"""Pages of more pieces are gathered: a chunk costs an entry in an index and a checksum."""

GATHER_BYTES = 64 << 20
"""Pages are gathered in lots of about so many bytes."""

GEOMETRY = (
    *("layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer"),
    *("head_num", "head_dim", "v_head_dim", "kv_cache_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("storage_format_tag", "dcp_size", "num_mamba_layers", "temporal_dtype", "conv_dtype"),
    *("temporal_state_shape", "conv_state_shapes"),
)
"""What a pool says of the inside of its pages, as far as it has it."""


class HostPool(Protocol):
    """What is used of a host pool of SGLang."""

    page_size: int

    def get_page_buffer_meta(self, indices: torch.Tensor) -> Any: ...

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor: ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None: ...


class HostPages:
    """The pages of one pool. `sizes` are the bytes of their pieces, `rank` says whose pages
    they are; `in_place=False` gathers pages whatever they are made of."""

    def __init__(self, pool_name: str, pool: HostPool, *, rank: str, in_place: bool = True) -> None:
        self._pool = pool
        self._flat_dtype = torch.uint8
        self.page_tokens: int = getattr(pool, "logical_page_size", pool.page_size)
        pieces = self._piece_sizes() if in_place else ()
        self.is_in_place = bool(pieces)
        self.sizes: tuple[int, ...] = pieces or (self._flat_size(),)
        geometry = {name: str(getattr(pool, name, None)) for name in GEOMETRY}
        geometry["interior"] = device_layout(pool)
        geometry["pieces"] = f"{self.sizes} {'in place' if self.is_in_place else 'gathered'}"
        described = json.dumps(geometry, sort_keys=True)
        self._prefix = chunk_name(pool_name, rank, type(pool).__name__, described)

    def _piece_sizes(self) -> tuple[int, ...]:
        """The bytes of each piece of a page; none where pages are better gathered."""
        try:
            meta = self._pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (NotImplementedError, ValueError):  # no addresses for this layout
            return ()
        sizes = () if meta is None else tuple(int(size) for size in meta[1])
        return sizes if len(sizes) <= MOST_PIECES else ()

    def _flat_size(self) -> int:
        """The bytes of a page that is copied. A pool may only number pages, and hold no bytes:
        what is kept then is that a page is, in one byte."""
        try:
            page = self._pool.get_data_page(0)
        except (NotImplementedError, ValueError) as error:
            raise SpecError(
                f"pages of {type(self._pool).__name__} in layout "
                f"{getattr(self._pool, 'layout', None)!r} can be neither addressed nor copied: "
                f"{error}\n\nhint: --hicache-mem-layout page_first"
            ) from error
        self._flat_dtype = page.dtype
        return max(1, page.nbytes)

    def names(self, keys: Sequence[str]) -> list[bytes]:
        """The names of all pieces of the pages that SGLang calls so, page by page."""
        return [
            self._prefix + chunk_name(key, str(piece))
            for key in keys
            for piece in range(len(self.sizes))
        ]

    def starts(self, count: int, indices: torch.Tensor | None) -> list[int]:
        """The first index of each of so many pages; SpecError where they are no pages."""
        tokens = self.page_tokens
        num_indices = 0 if indices is None else indices.numel()
        if indices is None or num_indices != count * tokens:
            raise SpecError(f"{num_indices} host indices for {count} pages of {tokens} tokens")
        pages = indices.detach().cpu().reshape(count, tokens).numpy()
        first = pages[:, 0]
        if (first % tokens).any() or (pages != first[:, None] + np.arange(tokens)).any():
            raise SpecError(f"host indices that are not {count} whole pages of {tokens} tokens")
        return first.tolist()

    def lots(self, count: int) -> Iterator[slice]:
        """How many pages are used at once: all in place, or as many as may be gathered."""
        step = max(1, count if self.is_in_place else GATHER_BYTES // sum(self.sizes))
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def read(self, starts: Sequence[int]) -> list[Bytes]:
        """The bytes of pages, piece by piece; in place, or copies."""
        if self.is_in_place:
            return self._views(starts)
        return [_whole(self._pool.get_data_page(start)) for start in starts]

    def room(self, starts: Sequence[int]) -> list[Bytes]:
        """Where pages may be written; `deliver` those that were."""
        if self.is_in_place:
            return self._views(starts)
        return [np.empty(self.sizes[0], np.uint8) for _ in starts]

    def deliver(self, starts: Sequence[int], room: Sequence[Bytes], whole: Bools) -> None:
        """The pages that were found go to their places."""
        if self.is_in_place:
            return
        for start, row, here in zip(starts, room, whole, strict=True):
            if here:
                page = torch.frombuffer(row, dtype=self._flat_dtype)
                self._pool.set_from_flat_data_page(start, page)

    def flat(self, page: torch.Tensor | None) -> Bytes:
        """The bytes of a page that SGLang has copied, or has room for, in place."""
        if self.is_in_place:
            raise SpecError("pages are used in place\n\nhint: leave interface_v1: 1 out")
        if page is None or not page.is_contiguous():
            raise SpecError("no flat page")
        row = _whole(page)
        if row.nbytes != self.sizes[0]:
            raise SpecError(f"a page of {row.nbytes} bytes, not {self.sizes[0]}")
        return row

    def whole(self, pieces: Bools) -> Bools:
        """Which pages have all their pieces."""
        whole: Bools = np.logical_and.reduce(pieces.reshape(-1, len(self.sizes)), axis=1)
        return whole

    def _views(self, starts: Sequence[int]) -> list[Bytes]:
        tokens = self.page_tokens
        indices = (torch.tensor(starts)[:, None] + torch.arange(tokens)).flatten()
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        if tuple(sizes) != self.sizes * len(starts):
            raise SpecError(f"pieces of {sizes} bytes, not {self.sizes} per page")
        return [
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            for address, size in zip(addresses, sizes, strict=True)
        ]


def device_layout(pool: object) -> str:
    """How the engine arranges heads and tokens in the buffers that the pool mirrors."""
    infos = getattr(pool, "_buffer_infos", ())
    return ",".join(str(getattr(getattr(info, "buffers", None), "layout", "")) for info in infos)


def _whole(page: torch.Tensor) -> Bytes:
    """The bytes of a flat page; one byte for a page that has none."""
    if not page.nbytes:
        return np.zeros(1, np.uint8)
    flat: Bytes = page.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat
