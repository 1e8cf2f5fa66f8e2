"""Rows in data files with an index, shared by processes, safe against crashes.

tier        DiskTier: store, load, evict
writing     rows onto disk: leased, written, made durable, entered
opening     the directory: lock, layout, index and data files, found or made
recovery    what is put right when a store is opened
attachment  a store in use, and an index that breaks meanwhile
index       SQLite: which row is where
segments    data files, read and written by several threads
format      the bytes of headers and records
files       the file layer, where faults can be injected
allocator   where new rows go, and which rows go first
owners      which processes have the store open
inspect     look at a store, verify every row
convert     rewrite a store for another layout
"""
