"""Rows moved between arena, host and disk in the background.

mover    Mover: store, load, prefetch
direct   copies that the caller submits itself and asks about later
checks   sums of rows, so that damaged ones are found when they come back
jobs     jobs, their parts and their queue
promote  rows from the tier below into the host tier, or past it
streams  copies ordered after the compute that they depend on
"""
