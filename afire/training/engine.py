"""What the loop runs on: accelerate's engine, the optimizer, and the small things processes must agree on."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from torch import nn

from afire.config import Config
from afire.data.dataset import Films, PackedFilms
from afire.errors import UserError
from afire.model import AFiRe


@dataclass(frozen=True)
class Flags:
    """What all processes agreed on for this step."""

    not_finite: bool
    signal: int
    save: bool

    @property
    def stop(self) -> bool:
        return self.signal != 0


def make_accelerator(config: Config, device: str) -> Accelerator:
    """accelerate's engine for the device and precision; one process without torchrun or accelerate launch."""
    precision = {"fp32": "no"}.get(config.training.precision, config.training.precision)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; use --device cpu or auto.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: torch sees no Apple GPU; use --device cpu or auto.")
    # accelerate keeps its first precision for the life of the process; a second run may want another.
    AcceleratorState._reset_state()
    # Prototypes are equal on all processes by construction; broadcasting them every step would be wasted.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)
    # Said outright, because accelerate forms a group of CPU processes only when told that it is to use the CPU.
    on_cpu = device == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    try:
        return Accelerator(mixed_precision=precision, cpu=on_cpu, kwargs_handlers=[ddp])
    except ValueError as error:
        raise UserError(f"training.precision {config.training.precision} does not work here: {error}") from None


def make_optimizer(model: AFiRe, config: Config) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: none on biases, norms, tokens and positions."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            lone = parameter.ndim <= 1 or name.endswith(("cls_token", "pos_embed", "mask_token"))
            (plain if lone else decayed).append(parameter)
    groups = [{"params": decayed, "decays": True}, {"params": plain, "decays": False}]
    return torch.optim.AdamW(groups, lr=config.training.learning_rate, fused=True)


def data_hash(films: Films, rows: np.ndarray) -> str:
    """Hash of the films of a run: the pixels when packed, else the manifest; and which rows are used."""
    content = films.summary.hash if isinstance(films, PackedFilms) else films.manifest.hash
    return hashlib.sha256(content.encode() + rows.astype("<i8").tobytes()).hexdigest()


def gradient_exchange(accelerator: Accelerator, wrapped: nn.Module, now: bool) -> AbstractContextManager[object]:
    """Exchange gradients with the other processes in this backward, or (``now`` false) only add them up here."""
    return nullcontext() if now else accelerator.no_sync(wrapped)
