"""The demo: a real model, prefilled in one process and decoded in another.

    parent (no torch)      starts the others, says what each has to do
      ├── prefill          computes prompts, offers their rows
      ├── decode           pulls the rows, continues, answers
      ├── single           the same prompts with transformers' own cache: the reference
      └── again            with --offload, at the end: answers from the rows on disk

story     the steps of a demo, in order
report    what happened, for people and as JSON
engine    what a child does with its model: prefill and offer, pull and continue, answer alone
weights   models by name: weights in installed packages, checkpoints, random ones

Rows go over NIXL. The processes are children of `kvstow.child`: none outlives the parent.
"""
