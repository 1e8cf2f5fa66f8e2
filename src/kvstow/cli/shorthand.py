"""A layout named on the command line: a manifest, or `MODEL@tp=2,order=BHLNC`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstow.cli.output import MISUSED, note, refuse
from kvstow.errors import ManifestError, ModelError
from kvstow.plan.deployment import Deployment, repacked
from kvstow.plan.layout import ORDERS, Layout, Order
from kvstow.plan.pack import PACKINGS, Packing

NUM_SLABS = 16
"""Slabs of each arena, unless the text says otherwise: a route's price does not depend on it."""

_NUMBERS = ("tp", "pp", "rank", "block_tokens", "num_slabs")
_CHOICES: dict[str, tuple[str, ...]] = {"order": ORDERS, "packing": PACKINGS}
_KEYS = (*_NUMBERS, *_CHOICES, "kv_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What was named: every rank of a deployment, one rank of it, or the one in a manifest."""

    text: str
    layouts: tuple[Layout, ...]
    ranks: tuple[int, ...]
    packing: Packing

    def reordered(self, order: Order) -> tuple[Layout, ...]:
        """The same ranks in another order."""
        return tuple(
            layout if layout.order == order else repacked(layout, order, self.packing)
            for layout in self.layouts
        )


def named(text: str, *, one_rank: bool) -> Named:
    """The layouts that `text` names. Without a `rank`, all of them, or rank 0 of them
    where one is wanted. Ends with 2 on a text that names none."""
    document = _manifest(text)
    if document is not None:
        rank = document.pp[0] * document.tp[1] + document.tp[0]
        return Named(text=text, layouts=(document,), ranks=(rank,), packing="slab")
    deployment, rank = _deployment(text)
    if rank is None and one_rank:
        rank = 0
        if deployment.num_ranks > 1:
            note(f"{text}: rank 0 of {deployment.num_ranks}; say rank=R for another")
    ranks = tuple(range(deployment.num_ranks)) if rank is None else (rank,)
    layouts = tuple(deployment.layout(rank) for rank in ranks)
    return Named(text=text, layouts=layouts, ranks=ranks, packing=deployment.packing)


def _manifest(text: str) -> Layout | None:
    """The layout in a file, if the text is the path of a manifest."""
    from kvstow.plan.manifest import MAX_BYTES, decode

    path = Path(text)
    if "@" in text or not path.is_file():
        return None
    with path.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if b'"kvstow"' not in data:
        return None
    try:
        return decode(data)
    except ManifestError as error:
        refuse(f"{text}: {error}", code=MISUSED)


def _deployment(text: str) -> tuple[Deployment, int | None]:
    from kvstow.plan.models import load_model

    model, _, rest = text.partition("@")
    settings: dict[str, Any] = {}
    for setting in filter(None, rest.split(",")):
        key, _, value = setting.partition("=")
        if key in settings:
            refuse(f"{text}: {key} is given twice\n\nhint: say {key}= once", code=MISUSED)
        settings[key] = _value(text, key, value)
    try:
        config = load_model(model)
    except ModelError as error:
        refuse(str(error), code=MISUSED)
    rank = settings.pop("rank", None)
    settings.setdefault("num_slabs", NUM_SLABS)
    return Deployment(model=config, **settings), rank


def _value(text: str, key: str, value: str) -> int | str:
    """The value of one setting; ends with 2 if it has no such value."""
    if key in _NUMBERS:
        number = int(value) if value.isascii() and value.isdecimal() and len(value) < 40 else -1
        fine, wanted = number >= (key != "rank"), "a whole number"
    elif key in _CHOICES:
        value = value.upper() if key == "order" else value
        fine, wanted = value in _CHOICES[key], f"one of {', '.join(_CHOICES[key])}"
    else:
        fine, wanted = key == "kv_dtype" and value != "", "a setting"
    if not fine:
        refuse(
            f"{text}: {key}={value} is not {wanted}\n\nhint: settings are {', '.join(_KEYS)}, "
            "as in llama-3.1-8b@tp=2,order=BHLNC",
            code=MISUSED,
        )
    return int(value) if key in _NUMBERS else value
