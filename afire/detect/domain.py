"""Whether a film is of the kind the detector was made for: a score for a hand, a photo or a negative means nothing.

A film's rank picture (a small picture with grey values replaced by their ranks) is compared with the typical one of
the normal films. Ranks do not care about contrast and exposure, which differ between machines; the pattern of lungs,
spine and shoulders stays. Two questions: does the film resemble the typical one, and would it resemble it more if it
were turned, upside down or a negative? Patterns of normal films (principal components, several typical films) were
tried beside them and added nothing (docs/detect.md has the numbers).

Shapes: N films, P = 24 x 24 places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afire.data.film import FilmInfo

SIDE = 24
TURNED = (0.05, 0.2)  # by so much another position must be more typical: as few normal films are, within these limits
ROOM = 0.06  # how far below the least typical normal films (1 in 100 left aside) a film may lie: findings change films
_LEFT_ASIDE = 0.01
_FLAT = 1e-4  # grey levels closer than this are one
_POSITIONS = ("inverted", "upside down", "upside down and mirrored", *("turned on its side",) * 4)


@dataclass(frozen=True)
class Domain:
    """The typical rank picture (P,), mean 0 and length 1, and when a film is out of domain: below this likeness to it,
    or when turning the film would gain more likeness than this."""

    typical: Tensor
    least_likeness: float
    most_gain: float = TURNED[0]

    @classmethod
    def of(cls, ranks_NP: Tensor) -> Domain:
        """From rank pictures of normal films; those that lie on their side or are negatives teach nothing."""
        gains = _gain_by_turning(ranks_NP, _typical(ranks_NP))[0]
        upright = ranks_NP[gains <= 0]
        if 2 * len(upright) < len(ranks_NP):  # the films have no position in common
            upright = ranks_NP
        typical = _typical(upright)
        least_likeness = float(torch.quantile(upright @ typical, _LEFT_ASIDE)) - ROOM
        most_gain = min(max(float(torch.quantile(gains, 1 - _LEFT_ASIDE)), TURNED[0]), TURNED[1])
        return cls(typical, least_likeness, most_gain)

    def objections(self, images: Tensor, infos: Sequence[FilmInfo] | None = None) -> list[list[str]]:
        """Why the scores of films (B, C, S, S) should not be trusted; empty for a film like those of the training."""
        gray = images.mean(dim=1, keepdim=True).float().cpu()
        blank = (gray.amax(dim=(1, 2, 3)) - gray.amin(dim=(1, 2, 3)) < _FLAT).tolist()
        ranks = rank_pictures(gray)
        gain, position = (values.tolist() for values in _gain_by_turning(ranks, self.typical))
        likeness = (ranks @ self.typical).tolist()
        found = []
        for number in range(len(images)):
            colour = infos is not None and infos[number].colour
            sentences = ["a colour picture, not a radiograph"] if colour else []
            if blank[number]:
                sentences.append("blank: one grey level")
            elif not colour:
                sentences += self._unlike(likeness[number], gain[number], _POSITIONS[position[number]])
            found.append(sentences)
        return found

    def _unlike(self, likeness: float, gain: float, position: str) -> list[str]:
        # What resembles a chest in no position is not called a turned one.
        if gain > self.most_gain and likeness + gain >= self.least_likeness:
            return [f"looks {position}"]
        if gain > self.most_gain or likeness < self.least_likeness:
            return [f"unlike the training films (likeness {likeness:.2f}, at least {self.least_likeness:.2f})"]
        return []

    def tensors(self) -> dict[str, Tensor]:
        """What is kept of it in a tensor file."""
        return {"typical": self.typical}

    def settings(self) -> dict[str, Any]:
        """What is kept of it as JSON."""
        return {"least_likeness": self.least_likeness, "most_gain": self.most_gain}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Domain:
        """From what :meth:`tensors` and :meth:`settings` gave."""
        return cls(tensors["typical"], float(settings["least_likeness"]), float(settings.get("most_gain", TURNED[0])))


def rank_pictures(gray_B1SS: Tensor) -> Tensor:
    """Films -> (B, P) of mean 0 and length 1: which places are brighter than which; equal places have equal ranks."""
    small = F.adaptive_avg_pool2d(gray_B1SS.float(), SIDE).flatten(1)
    rising = small.sort(dim=1).values
    below, upto = (torch.searchsorted(rising, small, right=right) for right in (False, True))
    return _unit((below + upto).float())


def _gain_by_turning(ranks_NP: Tensor, typical_P: Tensor) -> tuple[Tensor, Tensor]:
    """How much more typical another position is than the given one (N,), negative for most; and which it is (N,).

    A film that is only mirrored is not told apart: it differs from an upright one by little but the heart.
    """
    picture = typical_P.view(SIDE, SIDE)
    on_its_side = [turn for one in (picture, picture.flip(0)) for turn in (one.rot90(1), one.rot90(3))]
    others = torch.stack([-picture, picture.rot90(2), picture.flip(0), *on_its_side]).flatten(1)
    best = (ranks_NP @ others.T).max(dim=1)
    return best.values - ranks_NP @ typical_P, best.indices


def _typical(ranks_NP: Tensor) -> Tensor:
    return _unit(ranks_NP.median(dim=0).values[None])[0]


def _unit(values_NP: Tensor) -> Tensor:
    centred = values_NP - values_NP.mean(dim=1, keepdim=True)
    return F.normalize(centred, dim=1)
