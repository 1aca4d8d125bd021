"""Optimizer and learning rate of the supervised tasks: AdamW with layer-wise decay, warm-up and a cosine."""

from __future__ import annotations

import torch
from torch import nn

from afire.task_config import SupervisedConfig
from afire.training.engine import decays
from afire.training.schedules import cosine


def make_layered_optimizer(model: nn.Module, depth: int, config: SupervisedConfig) -> torch.optim.AdamW:
    """AdamW whose groups carry ``scale``: ``layer_decay`` once for each layer between a parameter and the end.

    ``depth`` is the number of encoder blocks; the encoder's parameters are named ``encoder.*``.
    """
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((layer_of(name, depth), decays(name, parameter)), []).append(parameter)
    settings = [
        {
            "params": parameters,
            "scale": config.layer_decay ** (depth + 1 - layer),
            "weight_decay": config.weight_decay if decayed else 0.0,
        }
        for (layer, decayed), parameters in sorted(groups.items())
    ]
    return torch.optim.AdamW(settings, lr=config.learning_rate, fused=True)


def layer_of(name: str, depth: int) -> int:
    """0 for patches, tokens and positions, 1 + i for block i, depth + 1 for the norm and everything outside."""
    if name.startswith("encoder.blocks."):
        return 1 + int(name.split(".")[2])
    return 0 if name.startswith("encoder.") and not name.startswith("encoder.norm.") else depth + 1


def learning_rate(config: SupervisedConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of ``step``, counted from 0, before the scale of a group."""
    steps = config.epochs * steps_per_epoch
    warmup = min(round(config.warmup_epochs * steps_per_epoch), steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return cosine(config.learning_rate, config.learning_rate_end, step - warmup, steps - warmup)
