"""A peer: an agent that we have met."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstow.errors import TransferError
from kvstow.plan.layout import Layout
from kvstow.route.blocks import Blocks
from kvstow.transfer.contact import Contact
from kvstow.transfer.options import DigestPolicy
from kvstow.transfer.path import Path, Way
from kvstow.transfer.pulling import Transfer
from kvstow.transfer.receiving import Push
from kvstow.transfer.ticket import Ticket

if TYPE_CHECKING:
    from kvstow.transfer.agent import Agent


class Peer:
    """Made by `Agent.connect`. Stays valid when the other agent is restarted."""

    def __init__(self, agent: "Agent", contact: Contact) -> None:
        self._agent = agent
        self._contact = contact

    @property
    def name(self) -> str:
        return self._contact.name

    @property
    def address(self) -> str:
        return self._contact.address

    @property
    def layout(self) -> Layout | None:
        return self._contact.layout

    @property
    def path(self) -> Path | None:
        """Which way bytes go between the two, and how that was decided."""
        return self._contact.path

    def pull(
        self,
        ticket: Ticket,
        *,
        into: Mapping[int, Blocks],
        start_token: int = 0,
        num_tokens: int | None = None,
        deadline: float | None = None,
        direction: Way | None = None,
        digest: DigestPolicy | None = None,
    ) -> Transfer:
        """Pull one ticket of this peer: see `Agent.pull`."""
        self._check(ticket)
        return self._agent.pull(
            ticket,
            into=into,
            start_token=start_token,
            num_tokens=num_tokens,
            deadline=deadline,
            direction=direction,
            digest=digest,
        )

    def push(self, blocks: Mapping[int, Blocks], *, to: Ticket) -> Push:
        """Push blocks of ours into what this peer expects under `to`: see `Agent.push`."""
        self._check(to)
        return self._agent.push(blocks, to=to)

    def _check(self, ticket: Ticket) -> None:
        if ticket.address != self.address:
            raise TransferError(f"ticket is of the agent at {ticket.address}, not of this one at "
                                f"{self.address}", kind="ticket", peer=self.name)  # fmt: skip
