"""The scores of `afire detect`: named functions with a fixed direction, larger = more abnormal.

Each score has a map, one number for every position of the film, and a way to draw a film's score from it. Maps are
standardised position by position with the mean and sd of normal films (``Fitted``), so that a map is read in sd of
normal films, whatever it was made from.

Shapes: B films, L positions, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afire.errors import UserError
from afire.model import AFiRe
from afire.tasks.detect.evidence import Evidence
from afire.tasks.detect.gaussian import TokenGaussian

PEAK_SHARE = 0.1  # of the positions: what `peak` averages
HIDDEN_SHARE = 0.25  # of the positions: most that the second pass hides
_SMALLEST_SD = 1e-6


@dataclass(frozen=True)
class Standard:
    """Mean and sd (L,) of a map on normal films."""

    mean: Tensor
    sd: Tensor

    @classmethod
    def of(cls, maps_NL: Tensor) -> Standard:
        exact = maps_NL.double()
        return cls(exact.mean(dim=0).float(), exact.std(dim=0, correction=0).clamp_min(_SMALLEST_SD).float())

    def __call__(self, map_BL: Tensor) -> Tensor:
        return (map_BL - self.mean) / self.sd


@dataclass(frozen=True)
class Fitted:
    """What was learnt from normal films beside the networks: token Gaussians, and the standard of every map."""

    gaussian: TokenGaussian
    standards: Mapping[str, Standard]


Maps = dict[str, Tensor]

MAPS = {
    "restoration": "squared restoration error of each patch",
    "surprise": "cross-entropy between a token's clusters and the prototype of its place, by the teacher",
    "student_surprise": "the same, by the student, which learnt to tell lesions from their place's prototype",
    "gaussian": "Mahalanobis distance of a teacher token from the normal tokens of its place",
    "two_pass": "restoration error of the tokens that the prototypes find abnormal, hidden behind z_mask",
    "lesion": "logit of the token lesion classifier, where the weights have one",
}


def raw_maps(
    model: AFiRe,
    evidence: Evidence,
    gaussian: TokenGaussian,
    hide_from: Standard | None,
    wanted: Collection[str] = tuple(MAPS),
) -> Maps:
    """The ``wanted`` maps (B, L) that the model has parts for, not standardised.

    ``hide_from`` is the standard of the surprise map, by which the second pass knows what to hide; without it there is
    no ``two_pass``. Networks that no wanted map needs are not run.
    """
    clusters = model.bank is not None and model.config.losses.contrast == "probability"
    draws = model.decoder is not None
    makers: dict[str, Callable[[], Tensor | None]] = {
        "gaussian": lambda: gaussian(evidence.tokens),
        "restoration": lambda: evidence.error if draws else None,
        "surprise": lambda: evidence.surprise,
        "student_surprise": lambda: evidence.student_surprise,
        "two_pass": lambda: second_pass_error(evidence, hide_from) if draws and clusters and hide_from else None,
        "lesion": lambda: evidence.lesion,
    }
    made = {name: make() for name, make in makers.items() if name in wanted}
    return {name: values for name, values in made.items() if values is not None}


def standardised(maps: Maps, standards: Mapping[str, Standard]) -> Maps:
    """Maps in sd of normal films."""
    return {name: standards[name](values) for name, values in maps.items()}


def suspicious(surprise_BL: Tensor) -> Tensor:
    """The positions to hide, bool (B, L): the most surprising quarter of each film.

    A fixed share and not a threshold, so that films are restored from equally many tokens and their errors compare.
    """
    count = max(1, round(HIDDEN_SHARE * surprise_BL.shape[1]))
    hidden = torch.zeros_like(surprise_BL, dtype=torch.bool)
    return hidden.scatter_(1, surprise_BL.topk(count, dim=1).indices, True)


def second_pass_error(evidence: Evidence, hide_from: Standard) -> Tensor:
    """Mean squared error (B, L) between the film and what the decoder draws where tokens are hidden, 0 elsewhere."""
    assert evidence.student_surprise is not None
    hidden_BL = suspicious(hide_from(evidence.student_surprise))
    return (evidence.behind(hidden_BL) - evidence.patches).square().mean(dim=-1) * hidden_BL


def mean(map_BL: Tensor) -> Tensor:
    return map_BL.mean(dim=1)


def peak(map_BL: Tensor) -> Tensor:
    """Mean of the highest tenth: a lesion is small, and the rest of the film would dilute it."""
    count = max(1, round(PEAK_SHARE * map_BL.shape[1]))
    return map_BL.topk(count, dim=1).values.mean(dim=1)


def log_mean_exp(map_BL: Tensor) -> Tensor:
    """log of the mean of exp. The paper's A = (1/L sum exp d)^-1 is exp(-s) of it; in log space nothing overflows."""
    return torch.logsumexp(map_BL.double(), dim=1) - math.log(map_BL.shape[1])


def reciprocal(map_BL: Tensor) -> Tensor:
    """log of the paper's A as printed: larger for films that are restored *well*."""
    return -log_mean_exp(map_BL)


@dataclass(frozen=True)
class Score:
    """A score: the map it reads, how a film's number comes from it, and whether it reads the map in sd of normals."""

    map: str
    pool: Callable[[Tensor], Tensor]
    meaning: str
    standard: bool = True


SCORES: dict[str, Score] = {
    "restoration": Score("restoration", log_mean_exp, "the paper's restoration score in log space", standard=False),
    "paper": Score(
        "restoration", reciprocal, "the reciprocal as the paper prints it: larger when restored well", standard=False
    ),
    "surprise": Score("surprise", mean, "prototype surprise of the teacher, mean over the film"),
    "surprise_peak": Score("surprise", peak, "prototype surprise of the teacher, highest tenth"),
    "student_surprise": Score("student_surprise", mean, "prototype surprise of the student, mean over the film"),
    "student_surprise_peak": Score("student_surprise", peak, "prototype surprise of the student, highest tenth"),
    "gaussian": Score("gaussian", mean, "distance of teacher tokens from their place's Gaussian, mean over the film"),
    "gaussian_peak": Score("gaussian", peak, "distance of teacher tokens from their place's Gaussian, highest tenth"),
    "two_pass": Score("two_pass", peak, "restoration of what the prototypes find abnormal, highest tenth"),
    # Not standardised: a logit is a probability of its own, and sd would lift places where all normals are sure.
    "lesion": Score("lesion", peak, "token lesion classifier, highest tenth", standard=False),
}


def film_scores(raw: Maps, standard: Maps, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Each score's number (B,) in double precision; all that the maps allow, or the named ones."""
    chosen = [name for name, score in SCORES.items() if score.map in raw] if names is None else names
    found: dict[str, Tensor] = {}
    for name in chosen:
        score = SCORES[name]
        if score.map not in raw:
            raise UserError(f"score {name} needs the map {score.map}, which these weights have no part for.")
        found[name] = score.pool((standard if score.standard else raw)[score.map]).double()
    return found
