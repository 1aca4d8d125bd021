"""Maps finer than tokens: a linear head says something of each of f x f cells of a token.

Shapes: B films, L positions, C kinds of maps, G x G cells, a token's side times f of them along each side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from afire.errors import UserError
from afire.nn.vit import at_least_float32, full_precision


def cell_side(patch_size: int, finer: int, setting: str) -> int:
    """Pixels along a cell's side; a message where ``finer`` cells, as ``setting`` says, do not fill a patch."""
    if patch_size % finer:
        raise UserError(
            f"a patch of {patch_size} px cannot be split into {finer} x {finer} cells; choose {setting} among its "
            "divisors."
        )
    return patch_size // finer


def dense_loss(logits: Tensor, target: Tensor, *, positive: float = 1.0) -> Tensor:
    """Mean binary cross-entropy of ``logits`` and shares ``target``, both (B, C, G, G), covered parts ``positive``
    times: a cell of share t costs -(positive t log p + (1 - t) log(1 - p))."""
    with full_precision(logits):
        logits = at_least_float32(logits)
        return F.binary_cross_entropy_with_logits(logits, target.to(logits), pos_weight=logits.new_tensor(positive))


def cells_of(values: Tensor, grid: tuple[int, int], finer: int) -> Tensor:
    """What a head says of each token (B, L, C * finer^2) -> maps (B, C, rows * finer, columns * finer)."""
    rows, columns = grid
    split = values.reshape(values.shape[0], rows, columns, -1, finer, finer)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(values.shape[0], -1, rows * finer, columns * finer)


def highest_of_tokens(maps: Tensor, finer: int) -> Tensor:
    """Maps of one kind (B, 1, G, G) -> the highest cell of each token (B, L)."""
    highest: Tensor = F.max_pool2d(maps, finer)
    return highest.flatten(1)


def overlap(logits: Tensor, target: Tensor) -> float:
    """Dice of maps (B, C, G, G) over the batch, cut at one half, averaged over the maps that cover any cell."""
    predicted, truth = logits > 0, target > 0.5
    both, either = ((predicted & truth).sum(dim=(0, 2, 3)), predicted.sum(dim=(0, 2, 3)) + truth.sum(dim=(0, 2, 3)))
    drawn = truth.any(dim=3).any(dim=2).any(dim=0)
    return (2 * both / either.clamp_min(1))[drawn].mean().item() if drawn.any() else 0.0


def order(logits: Tensor, target: Tensor) -> float:
    """AUC of cells: how often one covered by over half has a higher logit than one that is not at all; 0.5 without."""
    above, below = logits[target > 0.5].float(), logits[target == 0].float()
    if not (len(above) and len(below)):
        return 0.5
    ranked = torch.sort(below).values
    lower, upper = (torch.searchsorted(ranked, above, right=right) for right in (False, True))
    return ((lower + upper).double().mean() / (2 * len(below))).item()
