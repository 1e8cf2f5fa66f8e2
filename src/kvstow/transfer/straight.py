"""A route between two arenas at known addresses, until its callers ask the route themselves."""

from collections.abc import Mapping

from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies, merged
from kvstow.route.route import Route


class Ways:
    """A route, asked for addresses."""

    def __init__(self, route: Route) -> None:
        self.route = route

    def spans(
        self,
        source: Mapping[int, Blocks],
        destination: Mapping[int, Blocks],
        tokens: tuple[int, int],
        bases: tuple[int, int],
    ) -> Copies:
        """The copies that bring tokens `[first, end)` across, from address to address."""
        found = self.route.copies(source, destination, tokens[1], start_token=tokens[0])
        return merged(found.moved(*bases))
