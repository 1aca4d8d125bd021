"""Pre-training: schedules, batches, the loop, checkpoints and health."""

from afire.training.loop import PretrainResult, pretrain

__all__ = ["PretrainResult", "pretrain"]
