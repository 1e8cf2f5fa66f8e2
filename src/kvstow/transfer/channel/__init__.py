"""The side channel: small messages between agents.

- `messages`: what agents say to each other, to the byte
- `sockets`: ZeroMQ sockets that carry it
- `status`, `asking`: how an agent is doing, told and asked
"""
