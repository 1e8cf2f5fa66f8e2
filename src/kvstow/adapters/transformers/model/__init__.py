"""The model that fills a cache: what it keeps, and whether that serves other prompts.

inspect     what a model keeps, found by letting it keep a few tokens
identity    which computation fills its cache: weights, configuration, mode, adapters
passes      what the model is given, compared with the tokens that a cache was told
reuse       models and prompts whose rows serve no other prompt
"""
