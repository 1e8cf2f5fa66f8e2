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
fence        the generations of a ticket's blocks, read after the last byte
digests      which bytes are compared, and what they add up to
metrics      what is counted
options      times and sizes
slots        many short pieces as few long ones
tickets/     what a producer promises         peers/       agents that meet
channel/     messages between agents          transport/   engines, and memory that is mapped

A ticket is checked when it is parsed (`Ticket.from_bytes`: is it whole?), by its consumer (before
it meets the producer in `check_request`: is it of this request? and then in `pull.meet`: did that
agent write it?), and by its producer when a reader comes (`Leases.open`: does its lease run?).

Late writes are contained in two places. `Flight.land` says when nothing of a post writes any more:
only then are slots and counters given back. `Quarantine` has all that waits for that, or for a
producer to stop: rows of failed pulls, and transfers that end; and it replaces the engine where
nothing else helps. Mapped memory has no late writes.
"""
