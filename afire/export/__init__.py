"""Bundles and the formats of other libraries: written, described, and verified against ours.

Knows weights and detectors; knows no training.
"""
