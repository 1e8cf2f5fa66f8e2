"""Rows between processes and machines, and never silently wrong.

agent        offer, pull, keep, drop, settle: all that a user calls
pulls        all pulls of an agent, and what is owed for them
pull         a pull from top to bottom: meet, plan, move, fence, digests, accept
server       agents that dialled us, our leases, and what is served under them
serve        one transfer that is served, from top to bottom
loop         what drives them: routines, each in its own `try`
source       one ticket of a pull, and what is said to its producer
quarantine   when rows of a failed pull may be used again; fresh engines
prefixes     blocks that peers may ask for by key, without a ticket
discovery    where agents are: a list, or a name in DNS
fence        the generations of a ticket's blocks, read after the last byte
digests      which bytes are compared, and what they add up to
metrics      what is counted
options      times and sizes
slots        many short pieces as few long ones
tickets/     what a producer promises         peers/       agents that meet
channel/     messages between agents          transport/   engines, and memory that is mapped

A ticket is checked when it is parsed (`Ticket.from_bytes`), by its consumer (`Agent.pull`: what it
is of; `pull.meet`: whose it is), and by its producer when a reader comes (`Leases.open`).

Late writes are contained where a post is quiet (`Flight.land`), where a slot is given back
(`slots.when_quiet`), where a failed pull waits (`Quarantine.quiesced`), where a producer has
stopped (`serve.stopped`), and where the engine is replaced (`Endpoint.replace_engine`). Mapped
memory has none.
"""
