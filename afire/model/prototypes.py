"""Teacher assignments by Sinkhorn-Knopp, and the spatial prototypes C that remember them.

Shapes: N tokens, B images, L positions, K clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afire.model import distributed
from afire.model.precision import at_least_float32, full_precision


@torch.no_grad()
def sinkhorn(logits: Tensor, temperature: float = 0.05, iterations: int = 3) -> Tensor:
    """Logits (N, K) -> probabilities (N, K) whose rows sum to one and whose clusters are used about equally.

    Scales the columns and rows of exp(logits / temperature) in turn, clusters first, over the tokens of all
    processes. The largest exponent of each column, then of each row, is taken off beforehand: Sinkhorn's first step
    undoes any factor of a column, and the factor of a row is remembered in ``row_scale``. Then every row holds a 1,
    every column a 1 in a row of scale 1, so no sum is zero and nothing overflows, whatever the logits; and the
    iterations are products with vectors instead of passes of exp and log over the whole matrix.
    """
    if iterations < 1:
        raise ValueError(f"Sinkhorn needs at least one iteration, not {iterations}")
    with full_precision(logits):
        exponents = at_least_float32(logits) / temperature
        exponents -= distributed.maximum(exponents.amax(dim=0))
        row_maximum = exponents.amax(dim=1, keepdim=True)
        kernel = exponents.sub_(row_maximum).exp_()
        row_scale = row_maximum.squeeze(1).exp_()
        share = len(logits) * distributed.world_size() / logits.shape[1]  # tokens for each cluster
        for _ in range(iterations):
            # Clamped: where a cluster is out of reach of all but a few tokens, its scale grows without end.
            column_scale = share / distributed.total(row_scale @ kernel).clamp_(1e-30, 1e30)
            row_scale = (kernel @ column_scale).reciprocal_()
        return kernel.mul_(column_scale).mul_(row_scale[:, None])


class PrototypeBank(nn.Module):
    """One vector for each position: the running mean of what the teacher says there about normal films.

    Cluster probabilities by default, whose rows sum to one at all times; unit features in the feature ablation.
    """

    prototypes: Tensor
    steps: Tensor

    def __init__(self, positions: int, clusters: int, momentum: float = 0.75) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("prototypes", torch.full((positions, clusters), 1.0 / clusters))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update(self, mean: Tensor) -> Tensor:
        """Move towards this step's ``mean`` (L, K) of the global batch; the first one is taken as it is."""
        # A tensor, not an if: reading `steps` would make a GPU wait for its queue at every step.
        share = torch.where(self.steps == 0, 1.0, 1.0 - self.momentum).to(self.prototypes)
        self.prototypes.lerp_(mean.to(self.prototypes), share)
        self.steps += 1
        return self.prototypes


@torch.no_grad()
def position_mean(values: Tensor) -> Tensor:
    """(B, L, K) -> (L, K): the mean over the images of all processes, which hold equally many."""
    return distributed.total(values.mean(dim=0)) / distributed.world_size()
