"""Does a kernel write keys and values where packed rows have them, and nowhere else?

A cache-writing kernel is run on the layout itself and on placements that differ in one stride each,
in memory where every byte is a canary. Afterwards each slot holds exactly what it was given, and no
other byte has changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstow.errors import SpecError
from kvstow.memory.arena import POISON, Arena
from kvstow.plan.layout import Layout
from kvstow.testing.strides import check_callable, element_of, shapes, stride_variants

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCheck:
    """What happened with one placement of one layer's pages."""

    layer: str
    name: str
    wrong_slots: int
    stray_bytes: int
    refused: str = ""

    @property
    def honoured(self) -> bool:
        return not (self.refused or self.wrong_slots or self.stray_bytes)

    def __str__(self) -> str:
        verdict = "honoured" if self.honoured else "refused" if self.refused else "NOT HONOURED"
        why = self.refused or f"{self.wrong_slots} slots wrong, {self.stray_bytes} bytes elsewhere"
        return f"{self.layer}  {self.name:<20} {verdict:<12} {why}"


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What a cache-writing kernel honours."""

    checks: tuple[WriteCheck, ...]

    @property
    def ok(self) -> bool:
        return all(check.honoured for check in self.checks)

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the placements that failed, each once."""
        return tuple(dict.fromkeys(check.name for check in self.checks if not check.honoured))

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


def check_cache_write(
    write: CacheWrite, layout: Layout, *, device: str | torch.device = "cpu", seed: int = 0
) -> WriteReport:
    """Run a cache-writing kernel on one layer of each shape, keys and values or latents.

    Raises SpecError for a kernel that cannot be called so, and for a layout with less than two
    blocks beside the null block.
    """
    kinds = [fields for fields in _ARGUMENTS if _has(layout, fields)]
    if not kinds:
        raise SpecError(f"layout {layout.model!r} has no layer of keys and values, or of latents")
    checks: list[WriteCheck] = []
    for fields in kinds:
        check_callable(write, _ARGUMENTS[fields])
        for name in shapes(layout, fields):
            variants = stride_variants(layout.layers[name][1])
            for which, placed in (("the layout itself", layout), *variants):
                checks.append(
                    _check(write, placed, name, which, fields, torch.device(device), seed)
                )
    return WriteReport(tuple(checks))


def _has(layout: Layout, fields: tuple[str, ...]) -> bool:
    return any(
        set(fields) <= {field.name for field in spec.fields}
        for _, spec, _ in layout.layers.values()
    )


def _check(
    write: CacheWrite,
    layout: Layout,
    layer: str,
    name: str,
    fields: tuple[str, str],
    device: torch.device,
    seed: int,
) -> WriteCheck:
    group, spec, _ = layout.layers[layer]
    element_of(spec, fields)
    slots = _slots(
        np.random.Generator(np.random.PCG64(seed)), layout.num_blocks(group), spec.states
    )
    with Arena(layout, device=device) as arena:
        arena.bytes.fill_(POISON)
        contents = _contents(arena, layer, fields, len(slots), seed)
        views = [arena.field(layer, field) for field in fields]
        wanted = _written(arena.bytes, contents, views, slots.tolist(), spec.states)
        if fields == ("latent", "rope"):
            contents, views = [x[:, 0] for x in contents], [arena.tensor(layer)[:, 0]]
        try:
            write(*contents, *views, torch.as_tensor(slots, device=device))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            return WriteCheck(
                layer=layer,
                name=name,
                wrong_slots=0,
                stray_bytes=0,
                refused=f"{type(error).__name__}: {error}",
            )
        wrong = arena.bytes != wanted
        missed = [_slot_bytes(layout, layer, fields, int(slot)) for slot in slots]
        bad = sum(bool(wrong[where].any()) for where in missed)
        stray = int(wrong.sum()) - sum(int(wrong[where].sum()) for where in missed)
    return WriteCheck(layer=layer, name=name, wrong_slots=bad, stray_bytes=stray)


def _written(
    memory: torch.Tensor,
    contents: Sequence[torch.Tensor],
    views: Sequence[torch.Tensor],
    slots: Sequence[int],
    states: int,
) -> torch.Tensor:
    """A copy of the memory in which the contents are in their slots."""
    wanted = memory.clone()
    for content, view in zip(contents, views, strict=True):
        there = wanted.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())
        for token, slot in enumerate(slots):
            there[slot // states, :, slot % states] = content[token].to(view.dtype)
    return wanted


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


def _contents(
    arena: Arena, layer: str, fields: tuple[str, str], count: int, seed: int
) -> list[torch.Tensor]:
    """Random `[token, head, dim]` for each field, exact in the field's element type."""
    rng = torch.Generator().manual_seed(seed)
    found: list[torch.Tensor] = []
    for field in fields:
        view = arena.field(layer, field)
        _, heads, _, dim = view.shape
        content = torch.randn(count, heads, dim, generator=rng).to(view.dtype)
        wide = content.to(torch.bfloat16) if view.element_size() == 1 else content
        found.append(wide.to(view.device))
    return found


def _slot_bytes(layout: Layout, layer: str, fields: tuple[str, str], slot: int) -> torch.Tensor:
    """The numbers of the bytes that one slot's heads take."""
    found: list[torch.Tensor] = []
    for field in fields:
        view = layout.field(layer, field)
        block, head, token = view.axes[:3]
        start = view.offset + slot // token.size * block.stride + slot % token.size * token.stride
        heads = torch.arange(head.size) * head.stride
        found.append((start + heads[:, None] + torch.arange(view.shape[3] * view.unit)).ravel())
    return torch.cat(found)
