"""Rows kept outside the arena: in host memory, on disk, on other machines.

tier      what every tier does: rows by key, bounded, never a wrong row
keys      the one key scheme: what a block's row is called
store     Store: prefixes of prompts in tiers
prefixes  how much of a prompt can be loaded
request   whole requests out of stores of other ranks, orders and block sizes
rows      a row outside an arena: its layout and its mapping to blocks
arenas    rows between arenas and the tiers of a store
staging   rows of an arena as a tier keeps them
eviction  which rows go first, and which are worth keeping
host      rows in host memory, alone or shared by processes
disk      rows in data files with an index
remote    rows on S3, Redis or Mooncake, which other machines and layouts read
heartbeat what the tiers of a process have done, told to `kvstow top`
watch     which rows are in which tier, told as changes
events    what a ledger and a store have cached, published for routers
journal   which prompts were stored: digests of their blocks, tokens if asked for
why       where reuse of a prompt ended, and why
mover     rows moved between arena and tiers in the background
"""
