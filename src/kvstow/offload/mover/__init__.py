"""Rows moved between arena, host and disk in the background.

mover    Mover: store, load, prefetch
jobs     jobs, their parts and their queue
promote  rows from the tier below into the host tier, or past it
streams  copies ordered after the compute that they depend on
"""
