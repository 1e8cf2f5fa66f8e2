"""Sizing: what requests cost in a layout, how many fit on GPUs, and the figures that are shown.

plan        plan_model: model × tp × pp × dtype × packing → layouts of all ranks
capacity    what requests cost in a layout, and how many fit
weights     how many bytes a model's weights take
cluster     GPUs and engines: how many requests fit, what a load needs, the smallest cluster
serve       the vLLM command that serves what was sized
reports     the figures that commands and pages show, a report per question
"""
