"""A Gaussian of the tokens at each position of normal films: mean and shrunk covariance.

Shapes: N films, L positions, D width.

What the networks say about films, computed once for all scores.

Shapes: B films, L positions, D width, P pixels of a patch.

The scores of `afire detect`: named functions with a fixed direction, larger = more abnormal.

Each score has a map, one number for every position of the film, and a way to draw a film's score from it. Maps are
standardised position by position with the mean and sd of normal films (``Fitted``), so that a map is read in sd of
normal films, whatever it was made from.

Shapes: B films, L positions, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from afire.errors import UserError
from afire.methods.afire import AFiRe, Network
from afire.methods.equations import surprise as surprise_of


@dataclass(frozen=True)
class TokenGaussian:
    """``whiten`` (L, D, D) maps a centred token to one of unit covariance, so a distance is a length."""

    mean: Tensor  # (L, D)
    whiten: Tensor
    shrinkage: Tensor  # (L,)

    def __call__(self, tokens_BLD: Tensor) -> Tensor:
        """Mahalanobis distance (B, L) of every token from its place, divided by the root of D: about 1 for normals."""
        centred_LBD = (tokens_BLD.float() - self.mean).transpose(0, 1)
        whitened = torch.bmm(centred_LBD, self.whiten)
        return (whitened.square().mean(dim=-1)).sqrt().T

    def to(self, device: torch.device) -> TokenGaussian:
        return TokenGaussian(self.mean.to(device), self.whiten.to(device), self.shrinkage.to(device))


class GaussianFit:
    """Adds up batches of tokens; memory does not grow with the number of films.

    The covariance is shrunk towards a multiple of the identity by the Ledoit-Wolf rule, position by position, because
    there are often fewer films than dimensions. The rule needs the mean of |x|^4 about the mean beside the covariance.
    """

    def __init__(self) -> None:
        self.films = 0
        self._shift: Tensor | None = None  # near the mean, so that nothing cancels
        self._sum = self._outer = self._cubes = self._fourth = torch.zeros(())

    def add(self, tokens_BLD: Tensor) -> None:
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

    def finish(self) -> TokenGaussian:
        if self._shift is None or self.films < 2:
            raise UserError("the token Gaussians need at least 2 normal films.")
        n, d = self.films, self._shift.shape[-1]
        offset = self._sum / n
        covariance = self._outer / n - offset[:, :, None] * offset[:, None, :]
        shrinkage = _ledoit_wolf(covariance, self._fourth_about(offset), n)
        scale = covariance.diagonal(dim1=1, dim2=2).mean(dim=1)
        eye = torch.eye(d, dtype=torch.float64, device=covariance.device)
        shrunk = (1 - shrinkage)[:, None, None] * covariance + (shrinkage * scale.clamp_min(1e-12))[:, None, None] * eye
        values, vectors = torch.linalg.eigh(shrunk)
        whiten = vectors / values.clamp_min(values[:, -1:] * 1e-9).sqrt()[:, None, :]
        return TokenGaussian((self._shift + offset).float(), whiten.float(), shrinkage.float())

    def _fourth_about(self, offset_LD: Tensor) -> Tensor:
        """Mean of |x - offset|^4 (L,), from moments about the shift: |x - o|^2 = |x|^2 - 2 x.o + |o|^2, squared."""
        o2 = offset_LD.square().sum(dim=1)
        along = torch.einsum("ld,lde,le->l", offset_LD, self._outer, offset_LD) / self.films  # mean of (x.o)^2
        cubes = (self._cubes * offset_LD).sum(dim=1) / self.films  # mean of |x|^2 x.o
        squares = self._outer.diagonal(dim1=1, dim2=2).sum(dim=1) / self.films
        # The mean of x.o is |o|^2, because the offset is the mean.
        return self._fourth / self.films + 4 * along + o2.square() - 4 * cubes + 2 * squares * o2 - 4 * o2.square()


def fit_gaussian(batches: Iterable[Tensor]) -> TokenGaussian:
    """The Gaussian of tokens that come in batches (b, L, D)."""
    fit = GaussianFit()
    for tokens in batches:
        fit.add(tokens)
    return fit.finish()


def _ledoit_wolf(covariance_LDD: Tensor, fourth_L: Tensor, n: int) -> Tensor:
    """How much to shrink (L,), in [0, 1]: the expected error of the covariance over its distance from the identity."""
    d = covariance_LDD.shape[-1]
    squares = covariance_LDD.square().sum(dim=(1, 2))
    trace = covariance_LDD.diagonal(dim1=1, dim2=2).sum(dim=1)
    error = (fourth_L - squares) / n
    distance = squares - trace.square() / d
    return torch.where(distance > 0, error / distance.clamp_min(1e-300), 1.0).clamp(0, 1)


class Evidence:
    """One look at a batch of films (B, C, S, S) in [0, 1]. Each network runs at most once, and only if it is asked.

    What the model has no part for is None.
    """

    def __init__(self, model: AFiRe, images: Tensor) -> None:
        self._model, self._images = model, images
        self._behind: tuple[Tensor, Tensor] | None = None
        self._has_clusters = model.bank is not None and model.config.losses.contrast == "probability"

    @cached_property
    def tokens(self) -> Tensor:
        """(B, L, D) of the teacher."""
        return self._model.encode(self._images, "teacher")

    @cached_property
    def student_tokens(self) -> Tensor:
        """(B, L, D)."""
        return self._model.encode(self._images, "student")

    @cached_property
    def surprise(self) -> Tensor | None:
        """(B, L): H(q, c_j) of the teacher's tokens."""
        return self._surprise(self.tokens, "teacher") if self._has_clusters else None

    @cached_property
    def student_surprise(self) -> Tensor | None:
        """(B, L)."""
        return self._surprise(self.student_tokens, "student") if self._has_clusters else None

    @cached_property
    def lesion(self) -> Tensor | None:
        """(B, L): logits of the token lesion classifier."""
        classifier = self._model.lesion_classifier
        return None if classifier is None else classifier(self.student_tokens).squeeze(-1)

    @cached_property
    def patches(self) -> Tensor:
        """(B, L, P): the films themselves, in the decoder's normalised pixels."""
        return self._model.patches(self._images)

    @cached_property
    def restored(self) -> Tensor | None:
        """(B, L, P), with every token seen."""
        return None if self._model.decoder is None else self._model.decoder(self.student_tokens, None)

    @property
    def error(self) -> Tensor:
        """d_j = |y_j - x_j|^2 of every position (B, L), summed over its pixels."""
        assert self.restored is not None
        return (self.restored - self.patches).square().sum(dim=-1)

    def behind(self, hidden_BL: Tensor) -> Tensor:
        """Patches (B, L, P) as the decoder draws them when the tokens of ``hidden_BL`` are replaced by z_mask.

        The last answer is kept: the score and the picture of a film hide the same tokens.
        """
        assert self._model.decoder is not None
        if self._behind is None or not torch.equal(self._behind[0], hidden_BL):
            self._behind = hidden_BL, self._model.decoder(self.student_tokens, hidden_BL)
        return self._behind[1]

    def _surprise(self, tokens: Tensor, network: Network) -> Tensor:
        return surprise_of(self._model.assign_tokens(tokens, network), self._model.prototypes)


def look(model: AFiRe, images: Tensor) -> Evidence:
    """Films (B, C, S, S) in [0, 1] -> what both networks and the decoder say of them."""
    return Evidence(model, images)


def settle(model: AFiRe) -> AFiRe:
    """The model as it is after training: in evaluation mode, the teacher at its last temperature."""
    model.teacher_temperature = model.config.losses.teacher_temperature
    return model.eval().requires_grad_(False)


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
