"""Studies: many runs that answer one question, as steps that are planned, run and collected.

Knows training, tasks and detectors; knows no page and no figure.
"""
