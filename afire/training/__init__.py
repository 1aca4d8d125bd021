"""The training loop: batches, schedules, processes, checkpoints, the run folder and its journal.

Knows films, methods by their interface and how to take a step; knows not what the weights are used for.
"""

from afire.training.pretrain import pretrain
from afire.training.pretraining import PretrainResult

__all__ = ["PretrainResult", "pretrain"]
