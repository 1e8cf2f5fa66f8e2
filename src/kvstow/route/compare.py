"""Whether two layouts are of one model, stored alike: every difference, with both values."""

from collections.abc import Iterable, Iterator

import numpy as np

from kvstow.plan.layout import Layout
from kvstow.plan.spec import Extent, Field, LayerSpec
from kvstow.route.overlap import content_bits


def differences(source: Layout, destination: Layout) -> tuple[str, ...]:
    """What keeps a route from joining two layouts; empty where nothing does.

    A pipeline stage lacks layers, and that is no difference.
    """
    texts = list(_models(source, destination))
    return (*texts, *by_layers(_layers(source, destination)))


def _layers(source: Layout, destination: Layout) -> Iterator[tuple[str, str]]:
    """The differences, each with the name of its layer."""
    for name, (_, there, _) in destination.layers.items():
        if name in source.layers:
            for text in layer_differences(source.layers[name][1], there):
                yield name, text
        elif source.pp[1] == 1:
            yield name, "missing in the source, held by the destination"
    if destination.pp[1] == 1:
        for name in source.layers:
            if name not in destination.layers:
                yield name, "held by the source, missing in the destination"


def by_layers(lines: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Each text once, behind the layers that it is about."""
    names: dict[str, list[str]] = {}
    for name, text in lines:
        names.setdefault(text, []).append(name)
    return tuple(f"{_named(layers)}: {text}" for text, layers in names.items())


def _models(source: Layout, destination: Layout) -> Iterator[str]:
    if source.model and destination.model and source.model != destination.model:
        yield _both("model", repr(source.model), repr(destination.model))
    if source.identity is not None and destination.identity is not None:
        yield from source.identity.differences(destination.identity)
    elif source.identity is not None or destination.identity is not None:
        states = ("known" if side.identity else "not known" for side in (source, destination))
        yield _both("identity", *states)


def _both(what: str, source: object, destination: object) -> str:
    return f"{what} is {source} in the source, {destination} in the destination"


def _named(layers: list[str]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]!r}"
    if len(layers) <= 4:
        return f"layers {', '.join(map(repr, layers))}"
    return f"{len(layers)} layers, {layers[0]!r}, {layers[1]!r} … {layers[-1]!r}"


def layer_differences(source: LayerSpec, destination: LayerSpec) -> Iterator[str]:
    """What differs between two ranks' specs of one layer, beyond which part they hold."""
    if source.retention != destination.retention:
        yield _both("retention", source.retention, destination.retention)
    elif source.tokens_per_state != destination.tokens_per_state:
        yield _both("tokens per state", source.tokens_per_state, destination.tokens_per_state)
    yield from _axis_differences("heads", source.heads, destination.heads)
    here = {field.name: field for field in source.fields}
    there = {field.name: field for field in destination.fields}
    for name in [*here, *(name for name in there if name not in here)]:
        if name not in there:
            yield f"field {name!r} is {_shown(here[name])} in the source, none in the destination"
        elif name not in here:
            yield f"field {name!r} is none in the source, {_shown(there[name])} in the destination"
        else:
            yield from _field_differences(here[name], there[name])


def _shown(field: Field) -> str:
    return f"{field.dtype} {[axis.total for axis in field.axes]}"


def _field_differences(source: Field, destination: Field) -> Iterable[str]:
    what = f"field {source.name!r}"
    texts: list[str] = []
    if source.dtype != destination.dtype:
        texts.append(_both(f"{what}: dtype", source.dtype, destination.dtype))
    names = [axis.name for axis in source.axes], [axis.name for axis in destination.axes]
    if names[0] != names[1]:
        return [*texts, _both(f"{what}: axes", *names)]
    for here, there in zip(source.axes, destination.axes, strict=True):
        texts += _axis_differences(f"{what}: axis {here.name!r}", here, there)
    if texts or source.dtype.bits >= 8:
        return texts
    spans = content_bits(source, destination)
    if (np.stack((spans.source, spans.destination, spans.nbytes)) % 8).any():
        pieces = source.axes[-1].pieces, destination.axes[-1].pieces
        texts.append(_both(f"{what}: split inside a byte: held of the last axis", *pieces))
    return texts


def _axis_differences(what: str, source: Extent, destination: Extent) -> Iterator[str]:
    if source.total != destination.total:
        yield _both(f"{what}: size", source.total, destination.total)
