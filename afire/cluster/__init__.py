"""Work in shards: which rows are in which, files that appear whole or not at all, and who computes them.

Knows shards, their records and Ray; knows no film, it knows no network.
"""
