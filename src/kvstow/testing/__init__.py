"""What tests of kvstow, and of engines that build on it, have in common.

`attention` tells whether an attention kernel honours strides, `patterns` fills memory with
content that names its place, `layouts` draws layouts for hypothesis.
"""
