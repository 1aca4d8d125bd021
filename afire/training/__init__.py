"""The training loop: batches, schedules, processes, checkpoints, the run folder and its journal.

Knows films and how to take a step; knows no method by name and not what the weights are used for.
"""

from afire.training.loop import PretrainResult, pretrain

__all__ = ["PretrainResult", "pretrain"]
