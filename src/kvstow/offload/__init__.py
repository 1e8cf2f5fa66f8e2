"""Rows kept outside the arena: in host memory, on disk, and moved in the background.

tier      what every tier does: rows by key, bounded, never a wrong row
keys      the one key scheme: what a block's row is called
store     Store: prefixes of prompts in host memory and on disk
request   whole requests out of stores of other ranks, orders and block sizes
rows      a row outside an arena: its layout and its mapping to blocks
staging   rows of an arena as a tier keeps them
eviction  which rows go first, and which are worth keeping
host      rows in host memory, alone or shared by processes
disk      rows in data files with an index
watch     which rows are in which tier, told as changes
events    what a ledger and a store have cached, published for routers
mover     rows moved between arena, host and disk in the background
"""
