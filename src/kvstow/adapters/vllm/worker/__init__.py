"""In the process of a rank, one per rank: moves bytes, and decides nothing.

side        a step's orders and results: an agent over the engine's memory, and its tiers
offers      offers that are told before the engine's next step
leases      blocks that stay for somebody with a ticket, and which of them a pull has filled
pulls       rows of another engine, on their way into blocks of this one
tiers       rows stored and loaded
"""
