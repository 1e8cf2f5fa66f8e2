"""The demo: a real model, prefilled in one process and decoded in another.

    parent (no torch)          draws the screen, decides what happens next
      ├── prefill × tp         computes prompts, offers their rows
      ├── decode × tp          pulls the rows, goes on from there, streams the text
      └── single               the same prompts with transformers' own cache: the judge

Parent and children speak JSON lines over pipes (`messages`); rows go over NIXL. A child ends
when its standard input does, so none outlives the parent.
"""
