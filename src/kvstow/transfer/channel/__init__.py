"""The side channel: small messages between agents.

- `messages`: what agents say to each other
- `framing`: what a channel is; frames to the byte, and the sessions that they belong to
- `sockets`: the channel over ZeroMQ
- `curve`: keys, and who may be talked to
- `address`: which addresses can be dialled, which stay on this machine, where agents are
- `status`: how an agent is doing, told and asked
"""
