"""Sizing: what requests cost in a layout, how many fit on GPUs, and the figures that are shown.

plan        plan_model: model × tp × pp × dtype × packing → layouts of all ranks
capacity    what requests cost in a layout, and how many fit
cluster     weights and cache on GPUs: how many requests fit, what a load needs
engine      what an engine takes of a GPU beside weights and cache
answers     what fits on GPUs, as one report per question
report      the figures that commands and pages show
"""
