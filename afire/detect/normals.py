"""Statistics of normal films, kept as modules: the standard of a map, the Gaussian of a feature, the calibration of a
score, the domain of a detector.

Their buffers are filled by normal films. Being modules, they move, are saved and are loaded with the detector that
holds them.

Shapes: B films, L positions, D width of a feature, N normal films, P = 24 x 24 places of a rank picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from afire.data.film import FilmInfo
from afire.data.phantom import draw_batch
from afire.errors import UserError

Floats = NDArray[np.float64]
_SMALLEST_SD = 1e-6
SIDE = 24
TURNED = (0.05, 0.2)  # by so much another position must be more typical: as few normal films are, within these limits
ROOM = 0.06  # how far below the least typical normal films (1 in 100 left aside) a film may lie: findings change films
_LEFT_ASIDE = 0.01
CHEST = 0.33
"""Likeness to a typical chest below which a film is refused: set on training films of three hospitals, of which 99 in
100 have at least 0.35 (`benchmarks/detect_domain.py` counts what is refused)."""
OTHER_SOURCE = "unlike the films the detector was made from, perhaps of another scanner or age"
CALIBRATE = "`afire detect calibrate` on local normal films sets its threshold anew"
_MOSTLY = 0.5  # share of normal films that must be chests for a detector to be one of chests
_CHEST_SEED, _CHESTS, _CHEST_SIZE = 19, 48, 48
_FLAT = 1e-4  # grey levels closer than this are one
_POSITIONS = ("inverted", "upside down", "upside down and mirrored", *("turned on its side",) * 4)


class Fitted(nn.Module):
    """A module whose buffers take the shape of what was fitted, and of what is loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name, buffer in self._buffers.items():
            loaded = state_dict.get(prefix + name)
            if loaded is not None and buffer is not None:
                self._buffers[name] = torch.empty_like(loaded, device=buffer.device)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class OnCpu(Fitted):
    """Stays on the CPU in its own precision, wherever the networks go: it compares doubles, and not every device has
    them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OnCpu:
        return self


class Standard(Fitted):
    """Mean and sd (L,) of a map on normal films: reads a map in sd of normal films."""

    mean: Tensor
    sd: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(0))
        self.register_buffer("sd", torch.ones(0))

    def fit(self, maps_NL: Tensor) -> None:
        """From the maps of normal films."""
        exact = maps_NL.double()
        self.mean = exact.mean(dim=0).float()
        self.sd = exact.std(dim=0, correction=0).clamp_min(_SMALLEST_SD).float()

    def forward(self, map_BL: Tensor) -> Tensor:
        return (map_BL - self.mean) / self.sd


class Gaussian(Fitted):
    """A Gaussian of one feature (D,) for each film, and how far other films are from it (Mahalanobis distance)."""

    mean: Tensor  # (D,)
    whiten: Tensor  # (D, D): a centred feature times this has unit covariance, so that a distance is a length

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(0))
        self.register_buffer("whiten", torch.zeros(0))

    def fit(self, batches: Iterable[Tensor]) -> None:
        """From the features (B, D) of normal films."""
        moments = Moments()
        for features_BD in batches:
            moments.add(features_BD.cpu()[:, None])  # in double precision, which not every device has
        mean_LD, whiten_LDD, _ = moments.gaussian()
        self.mean, self.whiten = mean_LD[0], whiten_LDD[0]

    def forward(self, features_BD: Tensor) -> Tensor:
        """(B,), divided by the root of D: about 1 for normals."""
        return ((features_BD.float() - self.mean) @ self.whiten).square().mean(dim=1).sqrt()


class Moments:
    """Adds up batches of features of L positions; memory does not grow with the number of films.

    The covariance is shrunk towards a multiple of the identity by the Ledoit-Wolf rule, position by position, because
    there are often fewer films than dimensions. The rule needs the mean of |x|^4 about the mean beside the covariance.
    """

    def __init__(self) -> None:
        self.films = 0
        self._shift: Tensor | None = None  # near the mean, so that nothing cancels
        self._sum = self._outer = self._cubes = self._fourth = torch.zeros(())

    def add(self, tokens_BLD: Tensor) -> None:
        """Take in the features of some films."""
        tokens = tokens_BLD.double()
        if self._shift is None:
            self._shift = tokens.mean(dim=0)
        centred_LBD = (tokens - self._shift).transpose(0, 1)
        self._sum = self._sum + centred_LBD.sum(dim=1)
        self._outer = self._outer + centred_LBD.transpose(1, 2) @ centred_LBD
        squares_LB = centred_LBD.square().sum(dim=-1)
        self._cubes = self._cubes + (squares_LB[..., None] * centred_LBD).sum(dim=1)
        self._fourth = self._fourth + squares_LB.square().sum(dim=1)
        self.films += len(tokens)

    def gaussian(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (L, D), whitening matrices (L, D, D) and how much each covariance was shrunk (L,)."""
        if self._shift is None or self.films < 2:
            raise UserError("Gaussians need at least 2 normal films.")
        n, d = self.films, self._shift.shape[-1]
        offset = self._sum / n
        covariance = self._outer / n - offset[:, :, None] * offset[:, None, :]
        shrinkage = _ledoit_wolf(covariance, self._fourth_about(offset), n)
        scale = covariance.diagonal(dim1=1, dim2=2).mean(dim=1)
        eye = torch.eye(d, dtype=torch.float64, device=covariance.device)
        shrunk = (1 - shrinkage)[:, None, None] * covariance + (shrinkage * scale.clamp_min(1e-12))[:, None, None] * eye
        values, vectors = torch.linalg.eigh(shrunk)
        whiten = vectors / values.clamp_min(values[:, -1:] * 1e-9).sqrt()[:, None, :]
        return (self._shift + offset).float(), whiten.float(), shrinkage.float()

    def _fourth_about(self, offset_LD: Tensor) -> Tensor:
        """Mean of |x - offset|^4 (L,), from moments about the shift: |x - o|^2 = |x|^2 - 2 x.o + |o|^2, squared."""
        o2 = offset_LD.square().sum(dim=1)
        along = torch.einsum("ld,lde,le->l", offset_LD, self._outer, offset_LD) / self.films  # mean of (x.o)^2
        cubes = (self._cubes * offset_LD).sum(dim=1) / self.films  # mean of |x|^2 x.o
        squares = self._outer.diagonal(dim1=1, dim2=2).sum(dim=1) / self.films
        # The mean of x.o is |o|^2, because the offset is the mean.
        return self._fourth / self.films + 4 * along + o2.square() - 4 * cubes + 2 * squares * o2 - 4 * o2.square()


def _ledoit_wolf(covariance_LDD: Tensor, fourth_L: Tensor, n: int) -> Tensor:
    """How much to shrink (L,), in [0, 1]: the expected error of the covariance over its distance from the identity."""
    d = covariance_LDD.shape[-1]
    squares = covariance_LDD.square().sum(dim=(1, 2))
    trace = covariance_LDD.diagonal(dim1=1, dim2=2).sum(dim=1)
    error = (fourth_L - squares) / n
    distance = squares - trace.square() / d
    return torch.where(distance > 0, error / distance.clamp_min(1e-300), 1.0).clamp(0, 1)


class Calibration(OnCpu):
    """From a score to what it means: percentile among normals, conformal p-value, threshold of a false-alarm rate.

    The calibration films are normals that neither trained the networks nor chose the score. If a new film is normal
    and comes from where they come from, its p-value is at most a with probability at most a, whatever the score is.
    """

    scores: Tensor  # (N,) of the calibration normals, rising

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", torch.zeros(0, dtype=torch.float64))

    @classmethod
    def of(cls, scores: ArrayLike) -> Calibration:
        """From the scores (N,) of held-out normal films."""
        calibration = cls()
        calibration.fit(scores)
        return calibration

    def fit(self, scores: ArrayLike) -> None:
        """Take the scores (N,) of held-out normal films."""
        rising = np.sort(np.asarray(scores, np.float64))
        if len(rising) == 0 or not np.isfinite(rising).all():
            raise UserError("calibration needs finite scores of at least one normal film.")
        self.scores = torch.from_numpy(rising)

    @property
    def normal_scores(self) -> Floats:
        """(N,), rising."""
        values: Floats = self.scores.numpy()
        return values

    def __len__(self) -> int:
        return len(self.scores)

    def forward(self, scores_B: Tensor) -> Tensor:
        """p-values as in :meth:`p_values`, as part of a graph."""
        as_high = (self.scores[None] >= scores_B[:, None]).sum(dim=1)
        return (1 + as_high) / (1 + self.scores.shape[0])

    def p_values(self, scores: ArrayLike) -> Floats:
        """(1 + normals that score at least as high) / (1 + normals): never below 1 / (N + 1)."""
        as_high = len(self) - np.searchsorted(self.normal_scores, np.asarray(scores, np.float64), side="left")
        values: Floats = (1 + as_high) / (1 + len(self))
        return values

    def percentiles(self, scores: ArrayLike) -> Floats:
        """Percent of calibration normals that score lower, ties counting half."""
        values = np.asarray(scores, np.float64)
        below = np.searchsorted(self.normal_scores, values, side="left")
        upto = np.searchsorted(self.normal_scores, values, side="right")
        percent: Floats = 50 * (below + upto) / len(self)
        return percent

    def threshold(self, false_alarms: float) -> float:
        """The smallest score whose p-value is at most ``false_alarms``; infinite when there are too few normals.

        A film is flagged when its score is at least this.
        """
        may_pass = int(np.floor(false_alarms * (len(self) + 1) + 1e-9)) - 1  # normals that may score as high
        if may_pass < 0:
            return float("inf")
        if may_pass >= len(self):
            return float("-inf")
        return float(np.nextafter(self.normal_scores[len(self) - 1 - may_pass], np.inf))

    def smallest_rate(self) -> float:
        """The lowest false-alarm rate that this many normals can vouch for."""
        return 1 / (1 + len(self))


class Domain(OnCpu):
    """Whether a film is a frontal chest film at all, and whether it looks like those the detector was made from.

    A film's rank picture (a small picture with grey values replaced by their ranks) is compared with typical ones.
    Ranks do not care about contrast and exposure, which differ between machines; the pattern of lungs, spine and
    shoulders stays. Two typical pictures: ``chest`` is that of drawn chests of all ages, builds and framings, and what
    does not resemble it (a hand, a photo), or would resemble it more if it were turned or a negative, is refused.
    ``typical`` is that of the normal films that fitted the detector; what is a chest and unlike them, as from another
    scanner, is scored with a warning. Where the normal films are no chests, ``typical`` alone decides, and refuses.

    ``typical`` and ``chest`` (P,) have mean 0 and length 1; ``chest`` is zero where it does not decide.
    """

    typical: Tensor
    chest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("typical", torch.zeros(SIDE * SIDE))
        self.register_buffer("chest", torch.zeros(SIDE * SIDE))
        self.least_likeness, self.most_gain = 0.0, TURNED[0]

    @classmethod
    def of(cls, ranks_NP: Tensor) -> Domain:
        """From rank pictures of normal films."""
        domain = cls()
        domain.fit(ranks_NP)
        return domain

    def fit(self, ranks_NP: Tensor) -> None:
        """Learn from rank pictures of normal films; those that lie on their side or are negatives are left out."""
        gains = _gain_by_turning(ranks_NP, _typical(ranks_NP))[0]
        upright = ranks_NP[gains <= 0]
        if 2 * len(upright) < len(ranks_NP):  # the films have no position in common
            upright = ranks_NP
        self.typical = _typical(upright)
        self.least_likeness = float(torch.quantile(upright @ self.typical, _LEFT_ASIDE)) - ROOM
        self.most_gain = min(max(float(torch.quantile(gains, 1 - _LEFT_ASIDE)), TURNED[0]), TURNED[1])
        chest = typical_chest()
        are_chests = float((upright @ chest >= CHEST).double().mean()) >= _MOSTLY
        self.chest = chest if are_chests else torch.zeros_like(chest)

    def verdicts(
        self, images: Tensor, infos: Sequence[FilmInfo] | None = None
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Objections to films and warnings about them; films are ranked once for both."""
        gray = images.mean(dim=1, keepdim=True).float().cpu()
        ranks = rank_pictures(gray)
        return self._objections(gray, ranks, infos), self._warnings(ranks)

    def objections(self, images: Tensor, infos: Sequence[FilmInfo] | None = None) -> list[list[str]]:
        """Why films (B, C, S, S) are not to be scored: blank, turned, no frontal chest film; mostly empty."""
        return self.verdicts(images, infos)[0]

    def warnings(self, images: Tensor) -> list[list[str]]:
        """Warnings about films (B, C, S, S) that are scored; empty for films like those of the fit."""
        return self.verdicts(images)[1]

    def _objections(self, gray: Tensor, ranks: Tensor, infos: Sequence[FilmInfo] | None) -> list[list[str]]:
        blank = (gray.amax(dim=(1, 2, 3)) - gray.amin(dim=(1, 2, 3)) < _FLAT).tolist()
        knows_chests = bool(self.chest.any())
        reference = self.chest if knows_chests else self.typical
        limit = CHEST if knows_chests else self.least_likeness
        gain, position = (values.tolist() for values in _gain_by_turning(ranks, reference))
        likeness = (ranks @ reference).tolist()
        objections = []
        for number in range(len(gray)):
            colour = infos is not None and infos[number].colour
            messages = ["a colour picture, not a radiograph"] if colour else []
            if blank[number]:
                messages.append("blank: one grey level")
            elif not colour:
                complaint = "not a frontal chest film" if knows_chests else "unlike the training films"
                messages += self._unlike(likeness[number], gain[number], _POSITIONS[position[number]], limit, complaint)
            objections.append(messages)
        return objections

    def _unlike(self, likeness: float, gain: float, position: str, limit: float, complaint: str) -> list[str]:
        # What resembles a chest in no position is not called a turned one.
        if gain > self.most_gain and likeness + gain >= limit:
            return [f"looks {position}"]
        if gain > self.most_gain or likeness < limit:
            return [f"{complaint} (likeness {likeness:.2f}, at least {limit:.2f})"]
        return []

    def _warnings(self, ranks: Tensor) -> list[list[str]]:
        if not self.chest.any():  # what is unlike the training films is refused
            return [[] for _ in ranks]
        return [
            [] if likeness >= self.least_likeness else [f"{OTHER_SOURCE} (likeness {likeness:.2f}); {CALIBRATE}"]
            for likeness in (ranks @ self.typical).tolist()
        ]

    def limits(self) -> dict[str, float]:
        """What is saved as JSON, beside the tensors."""
        return {"least_likeness": self.least_likeness, "most_gain": self.most_gain}

    def set_limits(self, limits: Mapping[str, Any]) -> None:
        """Restore what :meth:`limits` returned."""
        self.least_likeness = float(limits["least_likeness"])
        self.most_gain = float(limits.get("most_gain", TURNED[0]))


@lru_cache(maxsize=1)
def typical_chest() -> Tensor:
    """(P,) of mean 0 and length 1: the median rank picture of healthy phantoms, which depends on no scanner."""
    phantoms = draw_batch(_CHEST_SEED, range(_CHESTS), _CHEST_SIZE, diseases=())
    return _typical(rank_pictures(torch.from_numpy(phantoms.images)))


def rank_pictures(gray_B1SS: Tensor) -> Tensor:
    """Films -> (B, P) of mean 0 and length 1: which places are brighter than which; equal places have equal ranks."""
    return _unit(_ranks(F.adaptive_avg_pool2d(gray_B1SS.float(), SIDE).flatten(1)).float())


def _ranks(values_NP: Tensor) -> Tensor:
    """How many values of its row are below each, plus how many are not above it: twice the rank, equal ones alike.

    Read off the sorted row: to search it for each value takes four times as long.
    """
    rising, order = values_NP.sort(dim=1)
    at = torch.arange(1, values_NP.shape[1] + 1, device=values_NP.device).expand_as(order)
    edge = torch.ones_like(rising, dtype=torch.bool)[:, :1]
    steps = torch.cat([edge, rising[:, 1:] != rising[:, :-1], edge], dim=1)  # before each value, and after the last
    below = torch.where(steps[:, :-1], at - 1, 0).cummax(dim=1).values
    upto = torch.where(steps[:, 1:], at, values_NP.shape[1]).flip(1).cummin(dim=1).values.flip(1)
    return torch.empty_like(order).scatter_(1, order, below + upto)


def _gain_by_turning(ranks_NP: Tensor, typical_P: Tensor) -> tuple[Tensor, Tensor]:
    """How much more typical another position is than the given one (N,), negative for most; and which it is (N,).

    A film that is only mirrored is not recognised: it differs from an upright one by little but the heart.
    """
    picture = typical_P.view(SIDE, SIDE)
    on_its_side = [turn for side in (picture, picture.flip(0)) for turn in (side.rot90(1), side.rot90(3))]
    positions = torch.stack([-picture, picture.rot90(2), picture.flip(0), *on_its_side]).flatten(1)
    best = (ranks_NP @ positions.T).max(dim=1)
    return best.values - ranks_NP @ typical_P, best.indices


def _typical(ranks_NP: Tensor) -> Tensor:
    return _unit(ranks_NP.median(dim=0).values[None])[0]


def _unit(values_NP: Tensor) -> Tensor:
    centred = values_NP - values_NP.mean(dim=1, keepdim=True)
    return F.normalize(centred, dim=1)
