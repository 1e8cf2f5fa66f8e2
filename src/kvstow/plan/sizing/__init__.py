"""Sizing: what requests cost in a layout, how many fit on GPUs, and the figures that are shown.

capacity    what requests cost in a layout, and how many fit
cluster     weights and cache on GPUs: how many requests fit, what a load needs
report      the figures that commands and pages show
"""
