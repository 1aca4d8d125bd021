"""What is turned into a graph: networks and, if wanted, what comes before them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from afire.config import ImageConfig
from afire.errors import UserError
from afire.tasks.backbone import Backbone

Preprocess = Literal["none", "normalise", "resize"]
_LARGEST = 16384  # pixels of a side


class Graph(nn.Module):
    """Something that takes ``images``.

    ``none``: the network's own input (B, C, S, S). ``normalise``: films (B, 1, S, S) in [0, 1]. ``resize``: films
    (B, 1, H, W) in [0, 1] of any size, squashed as :func:`afire.data.resize.fit_square` does it.
    """

    def __init__(self, image: ImageConfig, preprocess: Preprocess) -> None:
        super().__init__()
        if preprocess == "resize" and image.fit != "squash":
            raise UserError(
                f"a graph can only squash films, but these weights want {image.fit}; use --preprocess normalise."
            )
        self.preprocess, self.size = preprocess, image.size
        self.channels = image.channels if preprocess == "none" else 1

    def square(self, images: Tensor) -> Tensor:
        """Films at the model's size, still in [0, 1]."""
        if self.preprocess != "resize":
            return images
        side = (self.size, self.size)
        # The same filter as pillow's: cubic with a = -0.5, widened by the factor of reduction.
        return F.interpolate(images, size=side, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)

    def trace(self) -> ExportedProgram:
        """With a free batch size and, where it resizes, free height and width."""
        side = (self.size, self.size)
        free: dict[int, Dim] = {0: Dim("batch", min=1)}
        if self.preprocess == "resize":
            side = (self.size + 24, self.size + 8)
            free |= {2: Dim("height", min=2, max=_LARGEST), 3: Dim("width", min=2, max=_LARGEST)}
        # Two films: torch.export takes a batch of one for a fixed one.
        films = torch.linspace(0, 1, side[0] * side[1]).view(1, 1, *side).repeat(2, self.channels, 1, 1)
        return torch.export.export(self.eval(), (films,), dynamic_shapes={"images": free})


class EncoderGraph(Graph):
    """Films -> image tokens (B, L, D) and their mean (B, D)."""

    def __init__(self, backbone: Backbone, preprocess: Preprocess = "normalise") -> None:
        super().__init__(backbone.config.image, preprocess)
        self.encoder, self.normalise = backbone.encoder, backbone.normalise

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        films = images if self.preprocess == "none" else self.normalise(self.square(images))
        tokens: Tensor = self.encoder(films)[:, 1:]
        return tokens, tokens.mean(dim=1)
