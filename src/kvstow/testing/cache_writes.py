"""Does a kernel write keys and values where packed rows have them, and nowhere else?

A cache-writing kernel is run on the layout itself and on placements that differ in one stride each,
in memory where every byte is a canary. Afterwards each slot holds exactly what it was given, and no
other byte has changed.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvstow.errors import SpecError
from kvstow.memory.arena import POISON, Arena
from kvstow.plan.layout import Layout
from kvstow.testing.strides import (
    KERNEL_ERRORS,
    SEED,
    KernelCheck,
    KernelReport,
    check_callable,
    element_of,
    shapes,
    stride_variants,
)

CacheWrite = Callable[..., object]
"""`(keys [token, head, dim], values [token, head, dim], key_cache [block, head, token, dim],
value_cache [block, head, token, dim], slots [token])`: token `i` goes to slot `slots[i]`, which is
block `slots[i] // tokens per block` and place `slots[i] % tokens per block` in it. Of latents:
`(latents [token, dim], ropes [token, dim], cache [block, token, both], slots [token])`. Keys of fp8
caches come in bfloat16, are fp8 numbers already, and are stored with a scale of 1."""

_ARGUMENTS = {
    ("k", "v"): ("keys", "values", "key_cache", "value_cache", "slots"),
    ("latent", "rope"): ("latents", "ropes", "cache", "slots"),
}


def check_cache_write(
    write: CacheWrite, layout: Layout, *, device: str | torch.device = "cpu"
) -> KernelReport:
    """Run a cache-writing kernel on one layer of each shape, keys and values or latents.

    Raises SpecError for a kernel that cannot be called so, and for a layout with less than two
    blocks beside the null block.
    """
    kept = [{f.name for f in spec.fields} for _, spec, _ in layout.layers.values()]
    kinds = [fields for fields in _ARGUMENTS if any(set(fields) <= names for names in kept)]
    if not kinds:
        raise SpecError(f"layout {layout.model!r} has no layer of keys and values, or of latents")
    checks: list[KernelCheck] = []
    for fields in kinds:
        check_callable(write, _ARGUMENTS[fields])
        for layer in shapes(layout, fields):
            variants = stride_variants(layout.layers[layer][1])
            for name, placed in (("the layout itself", layout), *variants):
                with Arena(placed, device=device) as arena:
                    checks.append(_check(write, arena, layer, name, fields))
    return KernelReport(tuple(checks))


def _check(
    write: CacheWrite, arena: Arena, layer: str, name: str, fields: tuple[str, str]
) -> KernelCheck:
    group, spec, _ = arena.layout.layers[layer]
    element_of(spec, fields)
    rng = np.random.Generator(np.random.PCG64(SEED))
    slots = _slots(rng, arena.layout.num_blocks(group), spec.states)
    arena.bytes.fill_(POISON)
    contents = _contents(arena, layer, fields, len(slots))
    views = [arena.field(layer, field) for field in fields]
    expected = _written(arena.bytes, contents, views, slots.tolist(), spec.states)
    if fields == ("latent", "rope"):
        contents, views = [x[:, 0] for x in contents], [arena.tensor(layer)[:, 0]]
    try:
        write(*contents, *views, torch.as_tensor(slots, device=arena.device))
    except KERNEL_ERRORS as error:
        return KernelCheck(layer, name, f"{type(error).__name__}: {error}", is_refused=True)
    wrong = arena.bytes != expected
    own = [wrong[_slot_bytes(arena.layout, layer, fields, int(slot))] for slot in slots]
    bad = sum(bool(each.any()) for each in own)
    stray = int(wrong.sum()) - sum(int(each.sum()) for each in own)
    result = f"{bad} slots wrong, {stray} bytes elsewhere"
    return KernelCheck(layer, name, result, is_right=not (bad or stray))


def _written(
    memory: torch.Tensor,
    contents: Sequence[torch.Tensor],
    views: Sequence[torch.Tensor],
    slots: Sequence[int],
    states: int,
) -> torch.Tensor:
    """A copy of the memory in which the contents are in their slots."""
    expected = memory.clone()
    for content, view in zip(contents, views, strict=True):
        there = expected.view(view.dtype)
        there = there.as_strided(view.shape, view.stride(), view.storage_offset())
        for token, slot in enumerate(slots):
            there[slot // states, :, slot % states] = content[token].to(view.dtype)
    return expected


def _slots(
    rng: np.random.Generator, num_blocks: int, states: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Slots of every block but the null block, some of each, in random order."""
    if num_blocks < 3:
        raise SpecError(
            f"a layout of {num_blocks} blocks has less than two beside the null block, so strides "
            "would not be tested\n\nhint: three blocks are enough"
        )
    blocks = rng.permutation(np.arange(1, num_blocks))[:6]
    places = rng.integers(0, states, (len(blocks), 3))
    return rng.permutation(np.unique((blocks[:, None] * states + places).ravel()))


def _contents(arena: Arena, layer: str, fields: tuple[str, str], count: int) -> list[torch.Tensor]:
    """Random `[token, head, dim]` for each field, exact in the field's element type."""
    rng = torch.Generator().manual_seed(SEED)
    parts: list[torch.Tensor] = []
    for field in fields:
        view = arena.field(layer, field)
        _, heads, _, dim = view.shape
        content = torch.randn(count, heads, dim, generator=rng).to(view.dtype)
        wide = content.to(torch.bfloat16) if view.element_size() == 1 else content
        parts.append(wide.to(view.device))
    return parts


def _slot_bytes(layout: Layout, layer: str, fields: tuple[str, str], slot: int) -> torch.Tensor:
    """The numbers of the bytes that one slot's heads take."""
    parts: list[torch.Tensor] = []
    for field in fields:
        view = layout.field(layer, field)
        block, head, token = view.axes[:3]
        start = view.offset + slot // token.size * block.stride + slot % token.size * token.stride
        heads = torch.arange(head.size) * head.stride
        parts.append((start + heads[:, None] + torch.arange(view.shape[3] * view.unit)).ravel())
    return torch.cat(parts)
