"""How long cells may take: from finished ones, else from two steps of the base on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from afire.config import Config
from afire.lesions import synthesize_keyed
from afire.model import AFiRe
from afire.studies.ablate_grid import Cell, Study, relative_cost
from afire.studies.ablate_run import Workers
from afire.tasks.backbone import pick_device

_FORWARD_SHARE = 0.25  # of a training step: one forward of the encoder, without backward, decoder and head
_PASSES = 2.0  # over the films for probe and detection
_START = 15.0  # to import, open and write


def estimate_seconds(study: Study, cells: Sequence[Cell], workers: Workers) -> dict[str, float]:
    """Seconds of each cell by key."""
    known = [(cell, found) for cell in cells if (found := cell.result()) is not None]
    if known:
        per_cost = [sum(found["seconds"].values()) / relative_cost(cell.config) for cell, found in known]
        return {cell.key: float(np.mean(per_cost)) * relative_cost(cell.config) for cell in cells}
    per_film = _seconds_per_film(study.base, workers)
    films = study.films
    looked_at = _PASSES * _FORWARD_SHARE * sum(films[part] for part in ("train", "val", "test"))
    return {
        cell.key: _START
        + per_film * (cell.config.training.epochs * films["normal"] * relative_cost(cell.config) + looked_at)
        for cell in cells
    }


def _seconds_per_film(config: Config, workers: Workers) -> float:
    """Of one training step: the second of two, on drawn films, with the threads that a cell will have."""
    before = torch.get_num_threads()
    torch.set_num_threads(workers.threads)
    try:
        device = pick_device(workers.device)
        model = AFiRe(config).to(device)
        count, size = config.training.batch_size, config.image.size
        images = torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(0)).to(device)
        rows = torch.arange(count)
        seconds = 0.0
        for _ in range(2):
            started = time.perf_counter()
            lesioned, mask = synthesize_keyed(images, seed=0, epoch=0, indices=rows, config=config.lesions)
            model(images, lesioned, mask).total.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        return seconds / (count * relative_cost(config))
    finally:
        torch.set_num_threads(before)
