"""From normal films to a detector: maps, scores, calibration, domain, evaluation and runs over folders.

Knows methods and weights; knows no page and no command.
"""
