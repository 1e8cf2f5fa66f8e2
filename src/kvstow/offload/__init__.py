"""Rows kept outside the arena: in host memory, on disk, on other machines.

store     Store: prefixes of prompts in tiers
keys      the one key scheme: what a block's row is called, which rows a prompt has
copies    rows between arenas and host memory, and from there to the tiers below
tier      what every tier does: rows by key, bounded, never a wrong row
rows      a row outside an arena: its layout and its mapping to blocks
host      rows in host memory, alone or shared by processes
disk      rows in files named by their keys
remote    rows on S3, Redis or Mooncake, which other machines and layouts read
journal   which prompts were stored: digests of their blocks, tokens if asked for
why       where reuse of a prompt ended, and why
watch     which rows are in which tier, told as changes
events    what a ledger and a store have cached, published for routers
metrics   the numbers of tiers, for Prometheus

A save, a load, and what is promised where:

    Store.save   keys.PromptRows    which rows a prompt has, and their keys
                 Mover.store        arena → reserved rows of the host; kept when all bytes are there
                 Mover._demote      on to the tiers below; dropped, and counted, when too many wait
                 DiskTier.store     written, synced, then named: what has its name survives a kill
    Store.load   PromptRows.longest what every group can serve, by `contains`, which is a guess
                 Mover.load         host → arena; what is lacking: below → host, checked → arena
    eviction     each tier for itself, those used longest ago first; a row that is read stays whole
    recovery     a tier that is opened has what has names; nothing is replayed
"""
