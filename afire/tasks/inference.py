"""A network over many films without gradients, shared among processes; every process gets the answer for all films."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from afire.data.dataset import Films, PackedFilms
from afire.model import distributed

BATCH = 128


def to_device(films: Films, raw: Tensor, device: torch.device) -> Tensor:
    """Films as a loader hands them over (stored numbers or floats) to float32 (B, 1, S, S) in [0,1] on ``device``."""
    moved = raw.to(device, non_blocking=True)
    return films.to_unit(moved) if isinstance(films, PackedFilms) else moved


@torch.no_grad()
def predict(
    model: nn.Module,
    films: Films,
    rows: NDArray[np.int64],
    accelerator: Accelerator,
    reduce: Callable[[Tensor, NDArray[np.int64]], Tensor],
) -> NDArray[np.generic]:
    """What ``reduce`` keeps of each film, (len(rows), ...), in the order of ``rows``.

    ``reduce`` maps the outputs of a batch and its rows to a tensor whose first axis is the batch. A collective call.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    share = -(-len(rows) // world)
    # Process r takes every W-th film from the r-th; short shares are filled up, because a gather needs equal ones.
    mine = np.resize(rows[rank::world], share) if len(rows[rank::world]) else np.resize(rows, share)
    was_training = model.training
    model.eval()
    kept = [reduce(outputs, batch) for outputs, batch in _outputs(model, films, mine, accelerator)]
    model.train(was_training)
    gathered = distributed.gather(torch.cat(kept).to(accelerator.device)).cpu().numpy()
    in_order = gathered.reshape(world, share, *gathered.shape[1:]).swapaxes(0, 1)
    found: NDArray[np.generic] = in_order.reshape(world * share, *gathered.shape[1:])[: len(rows)]
    return found


def _outputs(
    model: nn.Module, films: Films, rows: NDArray[np.int64], accelerator: Accelerator
) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        raw = films.raw(batch) if isinstance(films, PackedFilms) else films.batch(batch)
        with accelerator.autocast():
            outputs = model(to_device(films, raw, accelerator.device))
        yield outputs.float(), batch
