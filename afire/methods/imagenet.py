"""ImageNet: a trunk that was trained elsewhere, for comparison. Nothing is learnt.

``afire pretrain --method imagenet --init FILE`` puts the weights of any file that ``--init`` reads (timm, DINO, MAE,
Hugging Face, a run, a bundle) into our trunk and writes a run of zero steps, which every task takes like any other.
What the weights were trained on is up to the file; the method is named after the usual one. To train further from
such weights, give ``--init`` to another method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afire.config import Config
from afire.methods.base import ALL, Keys, Losses, Method, Outputs, Views
from afire.nn.vit import VisionTransformer, initialise


class ImageNet(Method):
    """One encoder."""

    networks = ("encoder",)
    sections = ()
    trains = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.encoder = VisionTransformer.from_config(config.encoder, config.image)
        initialise(self, torch.Generator().manual_seed(config.seed))

    @classmethod
    def own_films(cls, config: Config) -> int:
        """It uses no films, so a batch of blank ones is enough."""
        return config.training.batch_size

    def views(self, images: Tensor, keys: Keys) -> Views:
        return {"images": images}

    def forward(self, views: Views) -> Outputs:
        return {"tokens": self.encode(views["images"])}

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """There is none: 0, whose gradient is 0."""
        nothing = 0.0 * outputs["tokens"].sum()
        return Losses({}, nothing)

    def flops(self) -> float:
        """None: no update is made."""
        return 0.0

    @classmethod
    def trunk_prefix(cls, network: str | None = None) -> str:
        return f"{cls.network(network)}."
