"""The projection head h: tokens to unit features, and unit features to K cluster logits.

Shapes: B images, L positions, D width, F bottleneck, K clusters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afire.config import HeadConfig
from afire.errors import UserError
from afire.model.precision import at_least_float32, full_precision


class ProjectionHead(nn.Module):
    """Three linear layers, L2 normalisation, and a weight-normalised map to the clusters without bias.

    The map's rows count by their direction only (weight normalisation with its gain fixed at 1), so logits are
    cosines in [-1, 1]. ``per_position`` has one matrix for each position, ``shared`` one for all.
    """

    def __init__(self, width: int, positions: int, config: HeadConfig, clusters: bool = True) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.bottleneck),
        )
        self.last_layer = ClusterLayer(positions, config) if clusters else None

    def features(self, tokens: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, F) of length one, in float32 at least."""
        projected: Tensor = self.mlp(tokens)
        return F.normalize(at_least_float32(projected), dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L, D) -> logits (B, L, K) in [-1, 1]."""
        if self.last_layer is None:
            raise UserError("this head contrasts features (losses.contrast is feature) and has no clusters.")
        logits: Tensor = self.last_layer(self.features(tokens))
        return logits


class ClusterLayer(nn.Module):
    """Cosines between features (B, L, F) and cluster directions, (K, F) for all positions or (L, K, F)."""

    def __init__(self, positions: int, config: HeadConfig) -> None:
        super().__init__()
        shape = (config.clusters, config.bottleneck)
        self.weight = nn.Parameter(torch.zeros(shape if config.form == "shared" else (positions, *shape)))

    def initialise(self, generator: torch.Generator) -> None:
        """Directions uniform on the sphere; the length does not matter to the output, only to the step size."""
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5, generator=generator)

    def forward(self, features: Tensor) -> Tensor:
        """Normalised features (B, L, F) -> logits (B, L, K)."""
        if self.weight.ndim == 3 and features.shape[1] != len(self.weight):
            raise UserError(
                f"a per_position head of {len(self.weight)} positions cannot take {features.shape[1]} tokens;"
                " use films of the size it was made for, or head.form shared."
            )
        # In float32: cosines are divided by temperatures down to 0.04, where bfloat16's digits would be worth 0.1.
        with full_precision(features):
            # Dividing the products by the rows' lengths is weight normalisation without a second copy of the weight,
            # which for per_position is by far the largest tensor of the head.
            lengths: Tensor = torch.linalg.vector_norm(self.weight, dim=-1).clamp_min(1e-12)
            if self.weight.ndim == 2:
                return F.linear(features, self.weight) / lengths
            products = torch.bmm(features.transpose(0, 1), self.weight.transpose(1, 2))
            return (products / lengths[:, None]).transpose(0, 1)
