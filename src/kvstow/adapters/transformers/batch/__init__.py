"""The sequences of a batch, behind one cache.

sequences   what the cache's layers store, pass by pass
requests    their requests of the ledger: admitted, forked, grown, released
prompts     tokens, padding and other content of sequences, as prompts
known       which tokens are known, and what may be kept under their names
states      recurrent states of the sequences, and passes that only they see
rows        rows of the batch's tokens: tokens written to them and gathered
"""
