"""Any layout to any layout: which bytes go where. Integers only.

blocks    the blocks of a request in one group, and which tokens they hold
compare   whether two layouts are of one computation, stored alike
overlap   what both sides hold of a layer
lanes     the copies of one pair of blocks, and the free bytes that may join them
expand    pairs of blocks → copies, with one branch for equal rows
copies    source, destination, nbytes: the one type for copies
route     Route: from layout to layout, for any request
rows      rows read whole and cut at the destination, instead of many small copies
sources   which peers bring what
price     what a route costs before anything is sent
ways      direct, rows, gathered, staged: which one an agent takes, and why

The package can be called: `kvstow.route(source, destination)` is `kvstow.route.route.route`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A module that is also the function of its name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call `kvstow.route.route.route`."""
        from kvstow.route.route import route

        return route(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
