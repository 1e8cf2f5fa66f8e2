"""Rows in data files with an index, shared by processes, safe against crashes.

tier       DiskTier: store, load, evict
files      the file layer, where faults can be injected
segments   data files: headers, slots, records, checksums
index      SQLite: which row is where
allocator  where new rows go, and which rows go first
recovery   opening a store, and repairing what a crash left
owners     which processes have the store open
inspect    look at a store, verify every row
convert    rewrite a store for another layout
"""
