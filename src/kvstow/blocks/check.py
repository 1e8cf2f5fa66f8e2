"""Do the books balance? Everything is counted again from the rows."""

from collections.abc import Iterator

import numpy as np

from kvstow.blocks.slabs import FREE, NOBODY, Slabs
from kvstow.blocks.stock import Stock


def broken_counts(slabs: Slabs) -> Iterator[str]:
    """Every number that does not add up, with both values."""
    held = np.zeros(slabs.num_slabs, np.int64)
    cached = np.zeros(slabs.num_slabs, np.int64)
    for stock in slabs.stocks:
        yield from _broken_rows(slabs, stock)
        of_rows = np.arange(stock.num_rows) // stock.rows_per_slab
        held += np.bincount(of_rows[stock.refs > 0], minlength=slabs.num_slabs)
        cached += np.bincount(of_rows[stock.queue.place >= 0], minlength=slabs.num_slabs)
    for what, counted, written in (("held", held, slabs.held), ("cached", cached, slabs.cached)):
        for slab in np.nonzero(counted != written)[0][:3]:
            yield f"slab {slab}: {counted[slab]} rows are {what}, {written[slab]} in the books"
    yield from _broken_slabs(slabs)


def _broken_rows(slabs: Slabs, stock: Stock) -> Iterator[str]:
    name = f"group {stock.name!r}"
    held, cached = stock.refs > 0, stock.queue.place >= 0
    sums = {
        "held": (int(held.sum()), stock.num_held),
        "cached": (int(cached.sum()), len(stock.queue)),
        "free + held + cached": (
            int(stock.free.sum() + held.sum() + cached.sum()),
            stock.num_rows,
        ),
        "negative holds": (int((stock.refs < 0).sum()), 0),
        "held null rows": (int((held | cached)[: stock.num_null].sum()), 0),
        "rows both held and cached": (int((held & cached).sum()), 0),
        "cached rows whose content is not kept": (int((cached & ~stock.kept).sum()), 0),
        "free rows whose content is kept": (int((stock.free & stock.kept).sum()), 0),
        "quarantined rows without a hold": (int((stock.quarantined & ~held).sum()), 0),
    }
    for what, (counted, written) in sums.items():
        if counted != written:
            yield f"{name}: {what}: {counted} counted, {written} expected"
    used = np.nonzero(held | cached)[0]
    foreign = used[slabs.owner[stock.slabs_of(used)] != stock.group]
    if len(foreign):
        slab = int(stock.slabs_of(foreign)[0])
        yield f"{name}: block {foreign[0]} is in use in slab {slab} of group {slabs.owner[slab]}"
    busy = (slabs.owner == stock.group) & (slabs.held > 0)
    spare = int((stock.rows_per_slab - slabs.held[busy]).sum())
    if spare != stock.spare:
        yield f"{name}: {spare} spare rows counted, {stock.spare} in the books"
    yield from _broken_shelves(slabs, stock)


def _broken_shelves(slabs: Slabs, stock: Stock) -> Iterator[str]:
    if stock.rows_per_slab == 1:
        return
    mine = slabs.owner == stock.group
    free = np.where(mine, stock.rows_per_slab - slabs.held - slabs.cached, 0)
    shelf = stock.partial.shelf[: slabs.num_slabs]
    expected = stock.shelves_of(np.arange(slabs.num_slabs), free)
    for slab in np.nonzero(shelf != expected)[0][:3]:
        yield (f"group {stock.name!r}: slab {slab} with {free[slab]} free rows is on shelf "
               f"{shelf[slab]}")  # fmt: skip
    idle = mine & (slabs.held == 0)
    queued = stock.idle.place >= 0
    for slab in np.nonzero(idle != queued)[0][:3]:
        yield f"group {stock.name!r}: slab {slab} is idle: {idle[slab]}, queued: {queued[slab]}"


def _broken_slabs(slabs: Slabs) -> Iterator[str]:
    vacant = (slabs.owner == NOBODY) & (np.arange(slabs.num_slabs) >= slabs.num_null)
    free = slabs.free.shelf[: slabs.num_slabs] == FREE
    for slab in np.nonzero(vacant != free)[0][:3]:
        yield f"slab {slab}: owner {slabs.owner[slab]}, on the free shelf: {free[slab]}"
    for slab in np.nonzero(~vacant & (slabs.held + slabs.cached == 0))[0][:3]:
        if slab >= slabs.num_null:
            yield f"slab {slab} of group {slabs.owner[slab]} is empty and not given up"
    num_idle = int(np.count_nonzero(slabs.held[slabs.num_null :] == 0))
    if num_idle != slabs.num_idle:
        yield f"{num_idle} idle slabs counted, {slabs.num_idle} in the books"
    if int(vacant.sum()) != slabs.free.totals[FREE]:
        yield f"{int(vacant.sum())} free slabs counted, {slabs.free.totals[FREE]} in the books"
