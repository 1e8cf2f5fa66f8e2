"""The demo: a real model, prefilled in one process and decoded in another.

    parent (no torch)          draws the screen, decides what happens next
      ├── prefill × tp         computes prompts, offers their rows
      ├── decode × tp          pulls the rows, goes on from there, streams the text
      └── single               the same prompts with transformers' own cache: the judge

story       what happens, in order; what has happened so far
options     what a demo is asked to do, and the prompts
screen      what has happened, drawn
processes   child processes: started, spoken to, ended
messages    what parent and children say to each other: JSON lines over pipes
worker      the main program of a child
roles       what a child does with its model: prefill and offer, pull and go on, or judge
parallel    one model over several processes
packaged    weights inside installed packages: which there are, and whether they are here
weights     models by name: packaged weights, checkpoints, random ones

Rows go over NIXL. A child ends when its standard input does, so none outlives the parent.
"""
