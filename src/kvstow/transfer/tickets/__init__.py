"""What a producer promises: which blocks, for whom, until when.

ticket       what a producer hands out
lease        until when it keeps the blocks
offers       all tickets of an agent, and the leases behind them
owner        who hands out block ids, and when they change owner
"""
