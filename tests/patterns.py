"""Content that names its place: two bytes that differ in place differ in value, nearly always."""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from kvstow.memory.arena import Arena
from kvstow.plan.spec import LayerSpec
from kvstow.route.blocks import Blocks

CANARY = 0xA5
"""What tests put around memory that must not change."""


def pattern(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Bytes without a period, the same for the same seed."""
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, nbytes, np.uint8)


def fill(arena: Arena, seed: int) -> None:
    """Give every byte of a host arena the pattern of the seed."""
    arena.bytes.numpy()[:] = pattern(arena.nbytes, seed)


def fill_canaries(arena: Arena) -> None:
    """Give every byte of an arena the canary, and wait until a device has done so."""
    arena.bytes.fill_(CANARY)
    _wait(arena)


def _wait(arena: Arena) -> None:
    if arena.device.type == "cuda":
        torch.cuda.synchronize(arena.device)


# ── contents of a request, in any layout ──────────────────────────────────────────────────


def fill_request(arena: Arena, blocks: Mapping[int, Blocks]) -> None:
    """Give every value of a request one that its layer, field, head, token and place decide.

    For attention with elements of two bytes, on any device. Two ranks, and two sizes of block,
    get the same values of the same tokens.
    """
    for view, ids, _, values in _request(arena, blocks):
        view[ids] = values
    _wait(arena)


def wrong_values(arena: Arena, blocks: Mapping[int, Blocks], num_tokens: int) -> int:
    """How many values of a request's tokens are not those of `fill_request`."""
    wrong = 0
    for view, ids, token, values in _request(arena, blocks):
        wrong += int(((view[ids] != values) & (token < num_tokens)).sum())
    return wrong


def _request(
    arena: Arena, blocks: Mapping[int, Blocks]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each field: a view of all its blocks, the request's ids, and for these their tokens and
    what they shall hold, `[block, head, token, content]`."""
    layers = list(arena.layout.layers)
    for group, listed in blocks.items():
        ids = torch.as_tensor(listed.ids, device=arena.device)
        index = torch.as_tensor(listed.index, device=arena.device)
        for layer in arena.layout.groups[group].group.layers:
            states = torch.arange(layer.states, device=arena.device)
            token = index[:, None, None, None] * layer.block_tokens + states[:, None]
            for number, field in enumerate(layer.fields):
                view = arena.field(layer.name, field.name).view(torch.int16)
                salt = 2 * layers.index(layer.name) + number
                yield view, ids, token, _values(layer, token, view.shape[3], salt)


def _values(layer: LayerSpec, token: torch.Tensor, dim: int, salt: int) -> torch.Tensor:
    """Below a prime, and different from one place to the next."""
    heads = [head for first, end in layer.heads.pieces for head in range(first, end)]
    head = torch.as_tensor(heads, device=token.device)[:, None, None]
    place = torch.arange(dim, device=token.device)
    mixed = (token * 7919 + head * 1299 + salt * 401) % 32749
    return ((mixed * 31 + place) % 32749).to(torch.int16)
