"""What the loop runs on: signals, rates by step, accelerate's engine, optimisers, what processes agree on, and FSDP.

With FSDP2, through accelerate, a model too large for one device trains on several: each process holds a shard of every
weight, of its gradient and of the optimiser's moments. A transformer block is gathered when it is run and let go after
it; everything outside of blocks is gathered for a whole step. Sums, averages and precision are those of DDP: weights
and their gradients stay float32, and autocast alone computes in less.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn

from afire.config import TrainingConfig
from afire.data.pack import Films, PackedFilms
from afire.errors import UserError
from afire.methods.base import cosine
from afire.nn import distributed
from afire.nn.vit import Block, at_least_float32

Shard = Literal["none", "ddp", "fsdp"]
_ASKED = "ACCELERATE_USE_FSDP"  # accelerate's own switch, which it leaves set for every later run of a process


class StopSignals:
    """``with StopSignals() as stop``: ``stop.received`` is the signal's number once one came, else 0.

    A second Ctrl-C is not held back: pressed twice, it means stop at once.
    """

    _WATCHED = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in self._WATCHED:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


class Rates(NamedTuple):
    """The optimiser's rates at one step."""

    learning_rate: float
    weight_decay: float


@dataclass(frozen=True)
class Schedules:
    """Learning rate and weight decay by step, counted from 0."""

    training: TrainingConfig
    steps_per_epoch: int

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.steps_per_epoch * self.training.epochs

    @property
    def peak_learning_rate(self) -> float:
        """The linear scaling rule: the setting is for a batch of 256."""
        return self.training.learning_rate * self.training.batch_size / 256

    def at(self, step: int) -> Rates:
        """The values of ``step``."""
        recipe = self.training
        rate = warmed_cosine(self.peak_learning_rate, recipe.learning_rate_end, step, self.steps, self.warmup_steps)
        return Rates(rate, cosine(recipe.weight_decay, recipe.weight_decay_end, step, self.steps))

    @property
    def warmup_steps(self) -> int:
        return min(round(self.training.warmup_epochs * self.steps_per_epoch), self.steps)


def warmed_cosine(peak: float, end: float, step: int, steps: int, warmup: int) -> float:
    """A linear rise to ``peak`` over ``warmup`` steps, then half a cosine down to ``end``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return cosine(peak, end, step - warmup, steps - warmup)


@dataclass(frozen=True)
class Flags:
    """What all processes agreed on for this step."""

    not_finite: bool
    signal: int
    save: bool

    @property
    def stop(self) -> bool:
        return self.signal != 0


def make_accelerator(
    precision: str, device: str, *, unused_parameters: bool = False, shard: Shard = "ddp"
) -> Accelerator:
    """accelerate's engine for the device and precision; one process without torchrun or accelerate launch.

    ``unused_parameters``: some parameters get no gradient in some steps, as where optimisers take turns. ``shard`` says
    how several processes share the weights.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; use --device cpu or auto.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: torch sees no Apple GPU; use --device cpu or auto.")
    # accelerate keeps its first precision for the life of the process; a second run may want another.
    AcceleratorState._reset_state(PartialState._shared_state.get("distributed_type") == DistributedType.FSDP)
    # Prototypes are equal on all processes by construction; broadcasting them every step would be wasted.
    # torch 2.13 warns about the flag's name; its successor does not exist in the oldest torch that we support.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=unused_parameters
    )
    # Explicit, because accelerate forms a group of CPU processes only when it is told to use the CPU.
    on_cpu = device == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    plugin = make_plugin(shard)
    try:
        accelerator = Accelerator(
            mixed_precision="no" if precision == "fp32" else precision,
            cpu=on_cpu,
            fsdp_plugin=plugin,
            kwargs_handlers=[ddp],
        )
    except ValueError as error:
        raise UserError(f"training.precision {precision} does not work here: {error}") from None
    settle(accelerator, shard, plugin)
    return accelerator


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    training: TrainingConfig,
    kind: Literal["adamw", "sgd"] = "adamw",
    layers_behind: Callable[[str], int] = lambda _: 0,
) -> torch.optim.Optimizer:
    """With weight decay on matrices only: none on biases, norms, tokens and positions.

    Groups carry ``scale``, a factor on the learning rate: ``layer_decay`` once for each of the ``layers_behind`` a
    parameter.
    """
    layers: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        behind = layers_behind(name) if training.layer_decay < 1 else 0
        layers.setdefault((behind, not decays(name, parameter)), []).append(parameter)
    groups = [
        {"params": own, "decays": not plain, "scale": training.layer_decay**behind}
        for (behind, plain), own in sorted(layers.items(), key=lambda item: item[0])
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=training.learning_rate, momentum=training.beta1)
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=(training.beta1, training.beta2), fused=True)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter has weight decay: matrices and kernels do; biases, norms, tokens and positions do not."""
    return parameter.ndim > 1 and not name.endswith(("cls_token", "pos_embed", "mask_token"))


def data_hash(films: Films, rows: np.ndarray) -> str:
    """Hash of the films of a run: the pixels when packed, else the manifest; and which rows are used."""
    content = films.summary.hash if isinstance(films, PackedFilms) else films.manifest.hash
    return hashlib.sha256(content.encode() + rows.astype("<i8").tobytes()).hexdigest()


def gradient_exchange(accelerator: Accelerator, wrapped: nn.Module, now: bool) -> AbstractContextManager[object]:
    """Exchange gradients with the other processes in this backward, or (``now`` false) only add them up here."""
    return nullcontext() if now else accelerator.no_sync(wrapped)


def any_process(accelerator: Accelerator, verdict: bool) -> bool:
    """Whether any process says so; all of them get the same answer."""
    return bool(distributed.maximum(torch.tensor(int(verdict), device=accelerator.device)).item())


def agree(accelerator: Accelerator, finite: bool, signal: int, save: bool) -> Flags:
    """One small exchange a step, so that all processes act at the same step on what any of them knows."""
    mine = torch.tensor([0 if finite else 1, signal, int(save)], device=accelerator.device)
    not_finite, received, save_due = distributed.maximum(mine).tolist()
    return Flags(bool(not_finite), received, bool(save_due))


def on_first_process(accelerator: Accelerator, write: Callable[[], None], what: str) -> None:
    """Write on the first process; a failure there ends all of them, with its message."""
    failure: UserError | None = None
    if accelerator.is_main_process:
        try:
            write()
        except UserError as error:
            failure = error
    if any_process(accelerator, failure is not None):
        raise failure or UserError(f"the first process could not write {what}; see its message.")


def explain(error: RuntimeError, processes: int, step: int) -> Exception:
    """A message when another process ended during an exchange, else the error itself."""
    message = str(error).lower()
    if processes > 1 and any(sign in message for sign in ("gloo", "nccl", "connection", "timed out")):
        return UserError(
            f"another process of this run ended or went silent at step {step}; see its message, then start "
            "again with --resume."
        )
    return error


def make_plugin(shard: Shard) -> FullyShardedDataParallelPlugin | None:
    """accelerate's settings for FSDP; None without it."""
    if os.environ.get(_ASKED, "false").lower() == "true" and shard != "fsdp":
        raise UserError(f"accelerate was set up for FSDP, but training.shard is {shard}; set training.shard=fsdp.")
    if shard != "fsdp":
        return None
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",  # which blocks these are, a learner says: _no_split_modules
            reshard_after_forward=True,
            mixed_precision_policy=MixedPrecisionPolicy(),  # given, or accelerate would keep weights in half precision
            cpu_ram_efficient_loading=False,  # every process makes the same weights from the seed or reads them
        )
    except (ImportError, TypeError, ValueError) as error:
        raise UserError(f"training.shard=fsdp needs torch 2.6 and accelerate 1.6 or newer ({error}).") from None


def settle(accelerator: Accelerator, shard: Shard, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Make accelerate shard among CPU processes too, and refuse several processes that were not asked for."""
    if shard == "none" and accelerator.num_processes > 1:
        raise UserError(
            f"training.shard=none trains on one process, but {accelerator.num_processes} were started; set "
            "training.shard=ddp or fsdp."
        )
    if plugin is None:
        return
    os.environ.pop(_ASKED, None)
    # Outputs are views where the last layer's are; nothing changes them in place, which is what torch warns of.
    warnings.filterwarnings("ignore", message=".*FSDP2-wrapped module.*returned a view", category=UserWarning)
    # accelerate hands the plugin to GPUs alone; torch shards among CPU processes just as well.
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights of a model are sharded."""
    return bool(_sharded_modules(model))


def compile_networks(model: nn.Module, accelerator: Accelerator) -> None:
    """``torch.compile``, of the whole or, before it is sharded, of each block: what is gathered at once."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for module in blocks if blocks and accelerator.is_fsdp2 else [model]:
        module.compile()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside the block all weights are whole on every process, and no network waits for another. A collective call.

    For what one process does alone, and for networks that are called otherwise than through ``forward``.
    """
    modules = _sharded_modules(model)
    hooks = [(module._forward_pre_hooks, module._forward_hooks) for module in modules]
    for module in modules:
        module.unshard()
        # FSDP's hooks gather, let go and note in which order: a process alone would wait for the others, or they later
        # for it. Nothing else hangs on a network of a learner.
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, (before, after) in zip(modules, hooks, strict=True):
            module._forward_pre_hooks, module._forward_hooks = before, after
            module.reshard()


def in_full_precision(outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Half precision becomes float32."""
    return {name: at_least_float32(value) if value.is_floating_point() else value for name, value in outputs.items()}


def _sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that are gathered at once, the root among them; none where nothing is sharded."""
    return [module for module in model.modules() if hasattr(module, "reshard") and hasattr(module, "unshard")]
