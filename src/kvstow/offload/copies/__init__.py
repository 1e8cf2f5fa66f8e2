"""Rows between arenas and host memory, and from there to the tiers below.

mover    Mover: store, load; how a row travels, read from top to bottom
jobs     jobs, their parts, the queues they wait in, and the compute that they wait for
checks   sums of rows, so that damaged ones are found when they come back
"""
