"""Rows between arenas and host memory, and from there to the tiers below.

movers   a mover for every arena that a store is used with
mover    Mover: store, load; how a row travels, read from top to bottom
jobs     jobs, their parts and the queues they wait in
window   host memory that rows only pass through
checks   sums of rows, so that damaged ones are found when they come back
streams  copies ordered after the compute that they depend on
"""
