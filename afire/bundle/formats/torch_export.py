"""``encoder.pt2``: a graph that ``torch.export.load`` opens without afire. Batch size is free."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from afire.bundle.formats.graph import EncoderGraph, Preprocess
from afire.tasks.backbone import Backbone

FILE = "encoder.pt2"


def write(folder: Path, backbone: Backbone, preprocess: Preprocess = "normalise") -> None:
    torch.export.save(EncoderGraph(backbone, preprocess).trace(), folder / FILE)


@torch.no_grad()
def run(folder: Path, backbone: Backbone, films: Tensor) -> dict[str, Tensor]:
    tokens, embedding = torch.export.load(folder / FILE).module()(films)
    return {"tokens": tokens, "embedding": embedding}
