"""The model that fills a cache: what it keeps, and whether it is still the same.

inspect     what a model keeps, found by letting it keep a few tokens
identity    which computation fills its cache: weights, configuration, code, adapters
watch       a model that is given other tokens than its cache, or has changed, is refused
ropes       ropes that follow the length: which rows serve which prompts
"""
