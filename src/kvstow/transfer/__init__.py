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

Late writes are contained by these, each for its own way of being late:

    Flight.land             nothing of a post of ours writes any more: slots and counters come free
    Quarantine.quiesced     rows of a failed pull wait for our posts, and for a producer to stop
    serve.stopped           the producer's side of that: it says so when its posts are quiet
    Server._end_earlier     an order on a line that was left does not begin after that
    slots.stage_pieces      a slot is used again only when it was fetched; the producer is done when
                            all were, so a slot that was used too soon is in no accepted pull
    mapped.copied           a copy inside this machine leaves nothing under way
    pull.check_still_ours   last of all, our rows must have kept their generations

`Quarantine.upkeep` replaces the engine where waiting does not help.
"""
