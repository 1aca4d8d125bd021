"""What a representation is worth: features, probe, fine-tuning, segmentation, and comparing their results.

Knows weights, films and labels; knows no table and no figure.
"""
