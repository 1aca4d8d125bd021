"""Is the run healthy? Numbers that tell learning from collapse, and what they mean.

Shapes: B images, L positions, K clusters, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

Colour = Literal["green", "amber", "red"]


@dataclass(frozen=True)
class Health:
    """What a method says about an epoch: numbers for the metrics file, a verdict, and a short form for the terminal."""

    numbers: Mapping[str, float]
    colour: Colour
    reason: str
    shown: str = ""

    def as_json(self) -> dict[str, Any] | None:
        """For a checkpoint; None where a number could not be stored."""
        return asdict(self) if all(math.isfinite(number) for number in self.numbers.values()) else None


@dataclass(frozen=True)
class TokenHealth:
    """Numbers of one epoch of AFiRe, each in [0,1] unless said otherwise. Entropies are shares of log K."""

    prototype_entropy: float  # mean entropy of a prototype: 1 = uniform, it says nothing about its place
    usage_entropy: float  # entropy of the mean assignment: 0 = all tokens in one cluster
    dead_clusters: float  # share of clusters that get less than a tenth of their even share
    effective_rank: float  # of the teacher's tokens: exp of the entropy of their spectrum, at most D (not a share)
    agreement: float  # share of normal tokens whose likeliest cluster is the same for student and teacher
    abnormal_share: float  # share of tokens that the lesions made abnormal
    image_dependence: float  # share of what q tells that depends on the film and not on the position alone
    structure: float  # structure loss at the end of the epoch, nats (not a share)

    def report(self) -> Health:
        """The numbers with their verdict."""
        colour, reason = self.verdict()
        shown = (
            f"clusters in use {1 - self.dead_clusters:.0%}, rank {self.effective_rank:.0f}, "
            f"agreement {self.agreement:.0%}, film dependence {self.image_dependence:.0%}, "
            f"abnormal {self.abnormal_share:.0%}"
        )
        return Health(asdict(self), colour, reason, shown)

    def verdict(self) -> tuple[Colour, str]:
        """A colour and its reason; the worst reason wins."""
        for colour, holds, reason in self._rules():
            if holds:
                return colour, reason
        return "green", "clusters are in use, features have many directions and assignments depend on the film"

    def _rules(self) -> list[tuple[Colour, bool, str]]:
        dead, rank, film = self.dead_clusters, self.effective_rank, self.image_dependence
        return [
            (
                "red",
                self.usage_entropy < 0.2,
                f"collapse: nearly all tokens fall into one cluster ({dead:.0%} are dead)",
            ),
            ("red", rank < 2, f"collapse: the teacher's features have one direction left (effective rank {rank:.1f})"),
            ("red", self.prototype_entropy > 0.995, "prototypes are uniform: they say nothing about their place"),
            (
                "red",
                self.structure < 0.05 and film < 0.02,
                f"degenerate solution: the structure loss is {self.structure:.3f} and only {film:.1%} of q depends on "
                "the film; the position alone answers it (head.form=shared or a larger losses.temperature helps)",
            ),
            (
                "amber",
                film < 0.05,
                f"assignments follow the position: only {film:.1%} of what q tells depends on the film",
            ),
            ("amber", dead > 0.5, f"{dead:.0%} of the clusters are dead"),
            ("amber", rank < 5, f"features have few directions (effective rank {rank:.1f})"),
            ("amber", self.agreement < 0.2, f"student and teacher agree on only {self.agreement:.0%} of normal tokens"),
            ("amber", not 0.005 < self.abnormal_share < 0.5, f"{self.abnormal_share:.1%} of tokens are abnormal"),
        ]


def information(place_nats: float, structure: float | None, category: float | None) -> dict[str, float]:
    """The mutual information of appendix A of the paper, in nats, from AFiRe's two token losses; None: switched off.

    ``place_information`` is a lower bound of I(q; place): H(place) - L_stru, at most H(place), where every token tells
    its place. H(place) is ``place_nats``: log L for positions, which are equally frequent; less for places in the
    chest, which are not. (The paper subtracts log L: there the probability of a place, 1/L, is dropped as a constant.)
    ``category_term`` is the conditional term that the category loss moves, the mean log P(q_i | c_j, q_b) = -L_cate, at
    most 0, where normal tokens of a place are alike and abnormal ones are not.
    """
    numbers: dict[str, float] = {}
    if structure is not None:
        numbers["place_information"] = place_nats - structure
    if category is not None:
        numbers["category_term"] = -category
    return numbers


def measure(
    student_BLK: Tensor,
    teacher_BLK: Tensor,
    tokens_BLD: Tensor,
    abnormal_BL: Tensor,
    prototypes_LK: Tensor,
    structure: float,
) -> TokenHealth:
    """Health from probabilities of both networks, the teacher's tokens, token labels and prototypes."""
    q = student_BLK.float()
    clusters = q.shape[-1]
    usage_K = teacher_BLK.float().mean(dim=(0, 1))
    normal = ~abnormal_BL
    same = student_BLK.argmax(-1) == teacher_BLK.argmax(-1)
    return TokenHealth(
        prototype_entropy=_entropy(prototypes_LK).mean().item() / math.log(clusters),
        usage_entropy=_entropy(usage_K).item() / math.log(clusters),
        dead_clusters=(usage_K < 0.1 / clusters).float().mean().item(),
        effective_rank=effective_rank(tokens_BLD.flatten(0, 1)),
        agreement=(same & normal).sum().item() / max(normal.sum().item(), 1),
        abnormal_share=abnormal_BL.float().mean().item(),
        image_dependence=image_dependence(q, normal),
        structure=structure,
    )


def image_dependence(q_BLK: Tensor, normal_BL: Tensor) -> float:
    """Of the information q carries, the share that depends on the film: I(k; film | position) / I(k; film, position).

    The joint information is the entropy of the mean over everything minus the mean entropy of a token; what is left
    when each position has its own mean is the film's part. 0: all films give the same answer at a position. Abnormal
    tokens are left out: a lesion changes q without the film being different.
    """
    weight = normal_BL.float()[..., None]
    per_position = weight.sum(0)
    mean_LK = (q_BLK * weight).sum(0) / per_position.clamp_min(1)
    share_L = per_position.squeeze(-1) / weight.sum().clamp_min(1)
    token = (_entropy(q_BLK) * weight.squeeze(-1)).sum() / weight.sum().clamp_min(1)
    given_position = (share_L * _entropy(mean_LK)).sum() - token
    joint = _entropy((share_L[:, None] * mean_LK).sum(0)) - token
    return (given_position / joint).clamp(0, 1).item() if joint > 1e-6 else 0.0


def with_information(
    health: Health,
    *,
    nats: float,
    structure: float | None,
    category: float | None,
    lesion_auc: float | None,
    left_open: float | None,
) -> Health:
    """With what the token losses bound (:func:`information`), how well lesions are told, and how many nats of the place
    a token's position leaves open, each where there is such a thing."""
    numbers, shown = information(nats, structure, category), health.shown
    if lesion_auc is not None:
        numbers["lesion_auc"] = lesion_auc
        shown += f", lesion AUC {lesion_auc:.2f}"
    if "place_information" in numbers:
        shown += f", I(token; place) at least {numbers['place_information']:.2f} of {nats:.2f} nats"
    if "category_term" in numbers:
        shown += f", category term {numbers['category_term']:.2f}"
    if left_open is not None:
        numbers["place_entropy"] = left_open
        shown += f", position leaves {left_open:.2f} nats of the place open"
    return replace(health, numbers={**health.numbers, **numbers}, shown=shown)


def place_entropy(place_BL: Tensor, places: int) -> float:
    """H(place | position) in nats over a batch: what a structure loss cannot fall below that position alone answers.

    0 where every position has one place, as in a grid.
    """
    counts_LP = torch.zeros(place_BL.shape[1], places, device=place_BL.device)
    counts_LP.scatter_add_(1, place_BL.T, torch.ones_like(place_BL.T, dtype=counts_LP.dtype))
    return _entropy(counts_LP / len(place_BL)).mean().item()


def place_nats(place_BL: Tensor, places: int) -> float:
    """H(place) in nats over all tokens of a batch: log of the number of places where all are equally frequent."""
    counts = torch.bincount(place_BL.flatten(), minlength=places).float()
    return _entropy(counts / counts.sum()).item()


def effective_rank(features_ND: Tensor) -> float:
    """exp of the entropy of the normalised singular values of centred features: how many directions are in use."""
    centred = features_ND.float() - features_ND.float().mean(0)
    values = torch.linalg.eigvalsh(centred.T @ centred / len(centred)).clamp_min(0).sqrt()
    if values.sum() < 1e-8:
        return 0.0  # all tokens are the same
    return _entropy(values / values.sum()).exp().item()


def _entropy(p: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(p).sum(dim=-1)
    return entropy
