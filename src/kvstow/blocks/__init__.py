"""Who owns which block. Ids only: no addresses, no memory, no torch.

In the order in which a request meets them:

    prompt      Prompt: token ids, and a hash of every prefix of them
    ledger      Ledger: all blocks of all requests; admit, grow, fork, release
    requests    what the ledger knows of each request
    prefix      PrefixCache: which rows hold the beginning of a prompt
    table       BlockTable: the blocks of every request in one group, and what a step adds
    pool        Pool: holds on rows, and what is in them
    placement   which rows a demand gets, and what is evicted for it
    slabs       Slabs: which group owns which slab
    rows        GroupRows: the state of every row of one group, and the lists to find rows in
"""
