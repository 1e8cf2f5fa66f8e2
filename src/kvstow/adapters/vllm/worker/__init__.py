"""In the process of a rank, one per rank: moves bytes, and decides nothing.

side        a step's orders and results: an agent over the engine's memory, and its parts
part        what the parts share, their verbs, and tasks that wait
offers      blocks that stay for somebody with a ticket, and their counters that peers read
pulls       rows of another engine, on their way into blocks of this one
tiers       rows stored and loaded
hints       rows that requests ask to keep, or to move out of the way
peers       other engines: asked for prefixes, lent rows
"""
