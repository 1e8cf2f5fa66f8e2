"""Rows in a directory: files named by what they hold, and no index.

tier     DiskTier: store, load, evict; which rows are whole
tree     names of row files, what they take, which go first, what killed writers left
format   the bytes of a row file
files    the file layer, where faults can be injected
opening  layout and capacity of a directory, found or made
inspect  look at a store, verify every row
convert  rewrite a store for another layout

A torn write is met in two places:

1. `tree.Writers.sweep`. A writer that is killed leaves a file that has no name in the tree yet; it
   goes when the next process opens the store or needs room.
2. `DiskTier.load`. Whatever else was torn, cut short, flipped, renamed or put there by others does
   not match its header or its checksum: it is a miss, is counted, and its name goes.
"""
