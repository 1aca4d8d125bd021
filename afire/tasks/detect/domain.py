"""Whether a film is of the kind the detector was made for: a score for a hand, a photo or a negative means nothing.

A film's rank picture (a small picture with grey values replaced by their ranks) is compared with the typical one of
the normal films. Ranks do not care about contrast and exposure, which differ between machines; the pattern of
lungs, spine and shoulders stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from afire.data.film import FilmInfo

SIDE = 24
NEGATIVE = -0.2  # likeness below which a film is taken for a negative
ROOM = 0.15  # how far below the least typical normal film (1 in 200 left aside) a film may lie: findings change films
_FLAT = 1e-4  # grey levels closer than this are one


@dataclass(frozen=True)
class Domain:
    """The typical rank picture (P,), mean 0 and length 1, and the likeness below which a film is out of domain."""

    typical: Tensor
    least_likeness: float

    @classmethod
    def of(cls, ranks_NP: Tensor) -> Domain:
        """From rank pictures of normal films."""
        middle = ranks_NP.median(dim=0).values
        typical = _unit(middle[None])[0]
        likeness = ranks_NP @ typical
        return cls(typical, max(float(torch.quantile(likeness, 0.005)) - ROOM, NEGATIVE))

    def likeness(self, images: Tensor) -> NDArray[np.float64]:
        """Correlation (B,) of films (B, C, S, S) with the typical one, in [-1, 1]; NaN for a blank film."""
        gray = images.mean(dim=1, keepdim=True).float().cpu()
        found = (rank_pictures(gray) @ self.typical).double().numpy()
        blank = (gray.amax(dim=(1, 2, 3)) - gray.amin(dim=(1, 2, 3))).numpy() < _FLAT
        return np.where(blank, np.nan, found)

    def objections(self, likeness: float, info: FilmInfo | None = None) -> list[str]:
        """Why a film's score should not be trusted; empty for a film like those of the training."""
        found = []
        if info is not None and info.colour:
            found.append("a colour picture, not a radiograph")
        if np.isnan(likeness):
            found.append("blank: one grey level")
        elif likeness < NEGATIVE:
            found.append(f"looks inverted (likeness {likeness:+.2f})")
        elif likeness < self.least_likeness:
            found.append(f"unlike the training films (likeness {likeness:+.2f}, at least {self.least_likeness:+.2f})")
        return found

    def tensors(self) -> dict[str, Tensor]:
        return {"typical": self.typical}

    def settings(self) -> dict[str, Any]:
        return {"least_likeness": self.least_likeness}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Domain:
        return cls(tensors["typical"], float(settings["least_likeness"]))


def rank_pictures(gray_B1SS: Tensor) -> Tensor:
    """Films -> (B, P) of mean 0 and length 1: which places are brighter than which."""
    small = F.adaptive_avg_pool2d(gray_B1SS.float(), SIDE).flatten(1)
    ranks = small.argsort(dim=1).argsort(dim=1).float()
    return _unit(ranks)


def _unit(values_NP: Tensor) -> Tensor:
    centred = values_NP - values_NP.mean(dim=1, keepdim=True)
    return F.normalize(centred, dim=1)
