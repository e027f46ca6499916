"""Compress models, and measure what compressing each weight costs at the outputs.

`compression` is the public call. `weight_forms` says which form a chip runs fast, `correcting` rounds each
weight for its inputs in samples, and `assignment` gives weights different bits. `sensitivity` measures what
coremltools does to each weight, and `assignment` chooses a mode for each. `cache_codes` stores the cache of a
decoder in 8 bits.
"""
