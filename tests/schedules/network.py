"""A clock and a network that the schedule moves: packets arrive when it says so, if at all, and in
order on each line, as over ZeroMQ."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvstow.transfer.channel.framing import Session, encode_message, read_frame
from kvstow.transfer.channel.messages import AnyMessage


class Clock:
    """Time, which passes when the schedule says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Packet(NamedTuple):
    """Bytes on their way: to the agent at `address`, or back to one that has dialled."""

    address: str
    client: bytes
    data: bytes


class Network:
    """Packets under way, and the channels that they go to."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []
        self.channels: dict[str, SimChannel] = {}
        self.dialled: dict[bytes, tuple[SimChannel, Session]] = {}
        self.deaf: set[str] = set()
        self.left: set[bytes] = set()
        """Lines that their clients have left, and on which everything is late."""
        self._made = 0

    def is_deaf(self, packet: Packet) -> bool:
        """Whether it goes to somebody, or on a line, to whom everything is late."""
        if packet.address:
            return packet.address in self.deaf or packet.client in self.left
        dialled = self.dialled.get(packet.client)
        return dialled is not None and dialled[0].address in self.deaf

    def first_of_line(self, packet: Packet) -> int:
        """The place of the oldest packet that goes the same way on the same line."""
        way = packet.address, packet.client
        return next(i for i, each in enumerate(self.packets) if (each.address, each.client) == way)

    def client(self) -> bytes:
        """A name for a new line, as a ROUTER would draw it."""
        self._made += 1
        return self._made.to_bytes(4, "big")

    def deliver(self, packet: Packet) -> None:
        """Let a packet arrive, if anybody is there."""
        if packet.address:
            channel = self.channels.get(packet.address)
            if channel is not None:
                channel.inbox.append(packet)
        elif packet.client in self.dialled:
            self.dialled[packet.client][0].inbox.append(packet)


class SimChannel:
    """One agent's side channel over the network."""

    def __init__(self, network: Network, address: str) -> None:
        self.address = address
        self.inbox: list[Packet] = []
        self.drops: list[str] = []
        self._network = network
        self._client_of: dict[Session, bytes] = {}
        self._address_of: dict[Session, str] = {}
        network.channels[address] = self

    def _on_drop(self, reason: str, detail: str) -> None:
        self.drops.append(reason)

    def dial(self, address: str, key: str) -> Session:
        line, client = Session(), self._network.client()
        self._client_of[line] = client
        self._network.dialled[client] = self, line
        self._address_of[line] = address
        return line

    def leave(self, line: Any) -> None:
        """What was sent on a line comes later than anything that is sent on the next one."""
        self._network.left.add(self._client_of[line])

    def hang_up(self, line: Any) -> None:
        client = self._client_of.pop(line, None)
        if client is not None:
            self._network.dialled.pop(client, None)

    def send(self, line: Any, message: AnyMessage) -> bool:
        data = encode_message(message)
        if line.is_incoming:
            self._network.packets.append(Packet("", line.client, data))
        elif line in self._client_of:
            packet = Packet(self._address_of[line], self._client_of[line], data)
            self._network.packets.append(packet)
        return line.is_incoming or line in self._client_of

    def watch(self, fd: int) -> None:
        """Turns come from the schedule."""

    def heard(self, timeout_ms: int) -> Iterator[tuple[Session, AnyMessage]]:
        arrived, self.inbox = self.inbox, []
        for packet in arrived:
            if packet.address:
                line = Session.of_client(packet.client)
            elif packet.client in self._network.dialled:
                line = self._network.dialled[packet.client][1]
            else:
                continue
            message = read_frame(packet.data, self._on_drop)
            if message is not None:
                yield line, message

    def close(self) -> None:
        """Nobody is at this address any more, and nothing comes back."""
        if self._network.channels.get(self.address) is self:
            del self._network.channels[self.address]
        for client in self._client_of.values():
            self._network.dialled.pop(client, None)
        self._client_of.clear()
