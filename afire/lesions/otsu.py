"""Otsu's threshold for a batch of films, and a random pixel among the chosen ones. Shapes: B films of H x W."""

from __future__ import annotations

import torch
from torch import Tensor

from afire.lesions.draws import below

_BINS = 256


def otsu_threshold(gray_BHW: Tensor) -> Tensor:
    """The grey value (B,) that best splits each film in two: the largest variance between the classes.

    The 256 bins span each film's own range, so a dim 16-bit film is split as finely as a bright one. A film of one
    value gets that value: nothing in it lies above.
    """
    return _split(gray_BHW)[0]


def otsu_with_bright_level(gray_BHW: Tensor) -> tuple[Tensor, Tensor]:
    """Otsu's threshold (B,) and the mean grey value (B,) above it, to within half a bin."""
    return _split(gray_BHW)


def _split(gray_BHW: Tensor) -> tuple[Tensor, Tensor]:
    flat = gray_BHW.flatten(1)
    low, high = flat.amin(1), flat.amax(1)
    width = (high - low) / _BINS
    counts = _histogram(flat, low, width)

    # Whole-number sums, exact in float64: empty bins tie exactly and the first wins everywhere. (MPS has no float64;
    # there the threshold may move by a bin.)
    exact = torch.float32 if flat.device.type == "mps" else torch.float64
    moments = counts * torch.arange(_BINS, device=flat.device)
    weight_below, sum_below = counts.cumsum(1)[:, :-1].to(exact), moments.cumsum(1)[:, :-1].to(exact)
    weight, total = flat.shape[1], moments.sum(1, keepdim=True).to(exact)
    weight_above = weight - weight_below
    spread = (total * weight_below - weight * sum_below).square() / (weight_below * weight_above).clamp(min=1)
    best = spread.argmax(1, keepdim=True)

    threshold = low + (best[:, 0] + 1) * width
    mean_bin = (total - sum_below.gather(1, best)) / weight_above.gather(1, best).clamp(min=1)
    bright = low + (mean_bin[:, 0].to(flat.dtype) + 0.5) * width
    single_valued = width <= 0
    return torch.where(single_valued, high, threshold), torch.where(single_valued, high, bright)


def _histogram(flat_BN: Tensor, low_B: Tensor, width_B: Tensor) -> Tensor:
    scale = 1 / width_B.clamp(min=torch.finfo(torch.float32).tiny)
    bins = (flat_BN - low_B[:, None]).mul_(scale[:, None]).clamp_(max=_BINS - 1).to(torch.int32)
    films = len(flat_BN)
    bins += torch.arange(films, dtype=torch.int32, device=bins.device)[:, None] * _BINS
    return torch.bincount(bins.view(-1), minlength=films * _BINS).view(films, _BINS)


class PixelPicker:
    """Picks uniformly among the chosen pixels of each film, without listing them.

    Counting by rows first means that a draw looks at one row of the film, not at all of it.
    """

    def __init__(self, chosen_BHW: Tensor) -> None:
        self.chosen_BHW = chosen_BHW
        self.cumulative_BH = chosen_BHW.sum(2, dtype=torch.int32).cumsum(1)

    @property
    def count(self) -> Tensor:
        """Number of chosen pixels (B,), int64."""
        return self.cumulative_BH[:, -1]

    def pick(self, draw_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Column and row, each (B, K), of one chosen pixel for each draw; (0, 0) in a film without any."""
        rank = below(draw_BK, self.count[:, None])
        row = torch.searchsorted(self.cumulative_BH, rank, right=True).clamp(max=self.chosen_BHW.shape[1] - 1)
        before = torch.nn.functional.pad(self.cumulative_BH, (1, 0)).gather(1, row)
        films = torch.arange(len(rank), device=rank.device)[:, None]
        along_row = self.chosen_BHW[films, row].cumsum(2, dtype=torch.int32)
        column = (along_row <= (rank - before)[:, :, None]).sum(2)
        none = (self.count == 0)[:, None]
        return column.masked_fill(none, 0), row.masked_fill(none, 0)
