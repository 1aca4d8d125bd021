"""Networks without a method: the vision transformer, heads, decoders, and what processes share.

Knows tensors and settings; knows no film, no loss and no loop.
"""
