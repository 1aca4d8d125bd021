"""Weights in parts: FSDP2 through accelerate, so that a model too large for one device trains on several.

Each process holds a part of every weight, of its gradient and of the optimiser's moments. A transformer block is
gathered when it is run and let go after it; everything outside of blocks is gathered for a whole step. Sums, averages
and precision are those of DDP: weights and their gradients stay float32, and autocast alone computes in less.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch import Tensor, nn

from afire.errors import UserError
from afire.nn.vit import Block, at_least_float32

Shard = Literal["none", "ddp", "fsdp"]
_ASKED = "ACCELERATE_USE_FSDP"  # accelerate's own switch, which it leaves set for every later run of a process


def make_plugin(shard: Shard) -> FullyShardedDataParallelPlugin | None:
    """What accelerate is to be told about FSDP; None without it."""
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
    """Whether the weights of a model lie in parts."""
    return bool(_parts(model))


def compile_networks(model: nn.Module, accelerator: Accelerator) -> None:
    """``torch.compile``, of the whole or, before it is sharded, of each block: what is gathered at once."""
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    for part in blocks if blocks and accelerator.is_fsdp2 else [model]:
        part.compile()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, all weights are whole on every process, and no network waits for another process. A collective call.

    For what one process does alone, and for networks that are called otherwise than through ``forward``.
    """
    parts = _parts(model)
    hooks = [(part._forward_pre_hooks, part._forward_hooks) for part in parts]
    for part in parts:
        part.unshard()
        # FSDP's hooks gather, let go and note in which order: a process alone would wait for the others, or they later
        # for it. Nothing else hangs on a network of a learner.
        part._forward_pre_hooks, part._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for part, (before, after) in zip(parts, hooks, strict=True):
            part._forward_pre_hooks, part._forward_hooks = before, after
            part.reshard()


def in_full_precision(outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Half precision becomes float32."""
    return {name: at_least_float32(value) if value.is_floating_point() else value for name, value in outputs.items()}


def _parts(model: nn.Module) -> list[Any]:
    """The modules that are gathered at once, the root among them; none where nothing is sharded."""
    return [part for part in model.modules() if hasattr(part, "reshard") and hasattr(part, "unshard")]
