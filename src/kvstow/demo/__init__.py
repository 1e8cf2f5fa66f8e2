"""The demo: a real model, prefilled in one process and decoded in another.

    parent (no torch)      draws the screen, decides what happens next
      ├── prefill          computes prompts, offers their rows
      ├── decode           pulls the rows, goes on from there, streams the text
      ├── single           the same prompts with transformers' own cache: the judge
      └── again            with --offload, at the end: answers from the rows on disk

story       what is to be done, what happens in order, what has happened so far
screen      what has happened, drawn
processes   child processes: started, spoken to, ended
messages    what parent and children say to each other
worker      the main program of a child
engine      what a child does with its model: prefill and offer, pull and go on, or answer alone
packaged    weights inside installed packages: which there are, and whether they are here
weights     models by name: packaged weights, checkpoints, random ones

Rows go over NIXL. A child ends when its pipe does, so none outlives the parent.
"""
