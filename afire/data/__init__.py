"""From files to trusted tensors: decode, manifests, public datasets, splits, audit, pack, phantom.

Knows files, patients and labels; knows no network.
"""
