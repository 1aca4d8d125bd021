"""Adam (Taher, Gotway and Liang 2023): MoCo on ever smaller pieces of the anatomy.

Written from the paper. As published: a film is divided into a grid of cells, one of them is drawn (anatomy decomposer),
and two views of that cell are to find each other among the keys of other cells and films, of which those that look too
much like the query are left out, because they may be the same anatomy of another patient (purposive pruner). Training
goes from coarse to fine: whole films first, without pruning, then cells of half the side, then of a quarter. Views are
not mirrored, because left and right are different anatomy.

Ours, beside what :mod:`afire.methods.twins` says: the stages are equal shares of one run with one schedule; the queue
knows which cell of which film a key is of.

Shapes: B films, F width of a key, Q places of the queue.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field, field_validator
from torch import Tensor

from afire.config import Config
from afire.lesions.places import below, keyed
from afire.methods.base import ALL, Keys, Losses, Outputs, Progress, Views
from afire.methods.crops import CropSettings, crops
from afire.methods.moco import MoCo, MoCoSettings
from afire.methods.twins import global_mean
from afire.nn.memory import of_all
from afire.nn.vit import at_least_float32

_CELLS = 0xADA1  # keeps the draws of cells apart from those of the views
_MOST_CELLS = 16
_ALL_PRUNED = 0.99


class Adam1Settings(MoCoSettings):
    """Settings of Adam itself."""

    stages: tuple[int, ...] = Field(
        (1, 2, 4),
        min_length=1,
        description="cells along a side of the film, by stage; each is an equal share of a run",
    )
    pruned_from: float = Field(
        0.8, gt=-1, le=1, description="keys at least this similar (cosine) to a query are left out; 1 = none"
    )
    crop: CropSettings = Field(CropSettings(mirror=0, turn=30), description="what a view of a cell may be")

    @field_validator("stages")
    @classmethod
    def _possible(cls, stages: tuple[int, ...]) -> tuple[int, ...]:
        for cells in stages:
            if not 1 <= cells <= _MOST_CELLS:
                raise ValueError(f"a film is divided into 1 to {_MOST_CELLS} cells along a side, not {cells}")
        return stages


def stage_of(epoch: int, epochs: int, stages: int) -> int:
    """The stage of an epoch, where each has an equal share of the epochs."""
    return min(epoch * stages // epochs, stages - 1)


def cell_boxes(cells: int, keys: Keys) -> tuple[Tensor, Tensor]:
    """One of ``cells`` x ``cells`` cells of each film: boxes (B, 4) in shares of the film, and their numbers (B,)."""
    draws = keyed(keys.seed ^ _CELLS, keys.epoch, keys.rows, 1, 1)[:, 0, 0]
    column, row = below(draws[:, 0], cells), below(draws[:, 1], cells)
    side = torch.full_like(column, 1, dtype=torch.float32) / cells
    return torch.stack([column * side, row * side, side, side], dim=-1), row * cells + column


class Adam1(MoCo):
    """Student, teacher and a queue of cells."""

    settings_type = Adam1Settings
    options: Adam1Settings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.cells = self.options.stages[0]

    def schedule(self, progress: Progress) -> Mapping[str, float]:
        """As for all, and how many cells a film has along its side now."""
        self.cells = self._cells_at(progress.step // progress.steps_per_epoch)
        return {**super().schedule(progress), "cells": self.cells}

    def _cells_at(self, epoch: int) -> int:
        stages = self.options.stages
        return stages[stage_of(epoch, self.config.training.epochs, len(stages))]

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Two random views of one cell of each film, and whose they are: a number for each cell of each film."""
        cells = self._cells_at(keys.epoch)
        boxes, numbers = cell_boxes(cells, keys)
        two = crops(
            images,
            keys,
            views=2,
            size=self.config.image.size,
            settings=self.options.crop,
            within=boxes[:, None].expand(-1, 2, -1),
        )
        # Grids of 1, 2, ... cells a side one after the other: cells of different stages have different numbers.
        coarser = sum(side**2 for side in range(1, cells))
        every = sum(side**2 for side in range(1, _MOST_CELLS + 1))
        rows = (keys.rows * every + coarser + numbers).to(images.device)
        views = {"query": two[0::2], "key": two[1::2], "rows": rows}
        depth = self.depth(keys, 1, images)
        return views if depth is None else {**views, "depth": depth}

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """The one loss there is, against the pruned queue; ``kept`` is the share of the queue that was not pruned."""
        others = self.queue.others(outputs["rows"])
        counts = others & ~self.pruned(outputs["query"])
        contrast = global_mean(self.told_apart(outputs["query"], outputs["key"].detach(), counts))
        share = global_mean(counts.sum(dim=1) / others.sum(dim=1).clamp_min(1))
        keys, owners = of_all(outputs["key"], outputs["rows"])
        return Losses({"contrast": contrast, "kept": share}, contrast, {"keys": keys, "owners": owners})

    @torch.no_grad()
    def pruned(self, query_BF: Tensor) -> Tensor:
        """Which keys (B, Q) of the queue are left out for each query."""
        if self.cells == 1 or self.options.pruned_from >= 1:  # whole films are not pruned
            return torch.zeros(len(query_BF), len(self.queue), dtype=torch.bool, device=query_BF.device)
        query_BF = at_least_float32(query_BF)
        return query_BF @ self.queue.keys.to(query_BF).T >= self.options.pruned_from

    def more_rules(self, numbers: Mapping[str, float]) -> list[tuple[str, bool, str]]:
        """A rule for a queue that is pruned completely, from which nothing is learnt."""
        pruned = 1 - numbers["kept"]
        return [
            (
                "red",
                self.cells > 1 and pruned > _ALL_PRUNED,
                f"{pruned:.0%} of the queue is pruned: nothing is left to tell a cell from; raise options.pruned_from "
                "or begin with a stage of 1 cell",
            ),
            ("amber", self.cells > 1 and pruned > 0.9, f"{pruned:.0%} of the queue is pruned"),
        ]
