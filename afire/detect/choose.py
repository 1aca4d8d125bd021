"""Joining scores without labels: how well each separates held-out normals from films with drawn lesions and findings.

The kinds of lesions differ in texture, size, place and strength, and most are unlike those of any training; findings
of the phantom, compared with healthy phantoms, are one kind more. A score takes part if it rises with every kind,
and if it still separates them when its best kinds are left out: one that has learnt a kind by heart does not. The
score of a film is the mean of those that take part in the spread of normals, each with a weight: half of it is the
same for all, half is fitted so that every kind counts the same. Scores that the fit gives next to nothing are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from afire.config import LesionConfig
from afire.errors import UserError
from afire.tasks.metrics import auc

Floats = NDArray[np.float64]
Scores = Mapping[str, Floats]

KINDS: dict[str, LesionConfig] = {
    "texture": LesionConfig(),
    "small texture": LesionConfig(size_min=12, size_max=32),
    "large haze in the lungs": LesionConfig(
        place="lungs", haze=1, size_min=64, size_max=140, fade=True, amplitude_min=0.3, amplitude_max=0.9
    ),
    "small haze in the lungs": LesionConfig(
        place="lungs", haze=1, size_min=24, size_max=64, fade=True, amplitude_min=0.3, amplitude_max=0.9
    ),
    "faint texture in the lungs": LesionConfig(
        place="lungs", size_min=32, size_max=96, fade=True, amplitude_min=0.1, amplitude_max=0.3
    ),
    "pasted patch": LesionConfig(kind="anatpaste"),
}
FINDINGS = "findings of the phantom"  # a kind whose normals are healthy phantoms
DRAWN = 200  # lesioned films of each kind, at least: few held-out normals are drawn on several times
MOST = 4  # scores in a combination
SHRINKAGE = 0.5  # share of the weights that is the same for all
_BARELY = 0.55  # mean AUC that a score must have without its best kinds
_BEST_KINDS = 1 / 3  # share of the kinds that is left aside for that
_NEXT_TO_NOTHING = 0.1  # share of the fitted weight below which a score is left out
_FAR = 8.0  # sd of normals beyond which a score no longer matters to the fit
_PULL = 0.3  # towards equal weights within the fit: few films must not decide between scores that are alike
NEVER_CHOSEN = ("paper",)  # a score whose direction is known to be wrong is shown, and not chosen


@dataclass(frozen=True)
class Component:
    """A score within a combination, brought to the middle and the spread of normals.

    Median, and half the range that holds 68 % of them (an sd where they are Gaussian): one odd normal film would
    stretch a plain sd so far that the score no longer counts beside the others.
    """

    name: str
    centre: float
    spread: float
    weight: float = 1.0  # against the others


@dataclass(frozen=True)
class Choice:
    """The chosen score and the numbers behind it: AUC of every score on every kind of lesion."""

    components: tuple[Component, ...]
    mean_auc: float
    table: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    films: int = 0
    asked: bool = False  # by name, not chosen

    @property
    def names(self) -> list[str]:
        """Of the scores it adds."""
        return [component.name for component in self.components]

    @property
    def name(self) -> str:
        """The scores it adds, as in ``surprise + gaussian``."""
        return " + ".join(self.names)

    def __call__(self, scores: Scores) -> Floats:
        """The film's score (N,): the weighted mean of its components in the spread of normals."""
        return combine(scores, self.components)


def unchosen(name: str) -> Choice:
    """A score as it is, until a fit has chosen."""
    return Choice((Component(name, 0.0, 1.0),), float("nan"))


def combine(scores: Scores, components: Sequence[Component]) -> Floats:
    """Weighted mean of the components (N,), each in the spread of normals."""
    values = [(np.asarray(scores[c.name], np.float64) - c.centre) / c.spread for c in components]
    joined: Floats = np.average(values, axis=0, weights=[c.weight for c in components])
    return joined


def choose(
    normal: Scores,
    lesioned: Mapping[str, Scores],
    score_names: Sequence[str] | None = None,
    references: Mapping[str, Scores] | None = None,
) -> Choice:
    """Weigh the scores, or take ``score_names`` with equal weights; ``lesioned`` has scores by kind of lesion.

    A kind is compared with its own ``references`` where it has any, else with ``normal``.
    """
    trials = {kind: (dict(references or {}).get(kind, normal), scores) for kind, scores in lesioned.items()}
    table = {name: _separations(trials, name) for name in normal}
    if score_names is not None:
        return _taken(normal, trials, score_names, table)
    names, steps = _candidates(table), []
    while True:
        shares = _fitted_shares(trials, names)
        weakest = min(names, key=lambda name: shares[name])
        if len(names) == 1 or (shares[weakest] >= _NEXT_TO_NOTHING and len(names) <= MOST):
            break
        steps.append(f"{weakest}: left out, its fitted share was {shares[weakest]:.2f}")
        names = [name for name in names if name != weakest]
    components = []
    for name in sorted(names, key=lambda name: -shares[name]):
        weight = SHRINKAGE / len(names) + (1 - SHRINKAGE) * shares[name]
        mean_auc = float(np.mean(list(table[name].values())))
        steps.append(f"{name}: weight {weight:.2f} (fitted {shares[name]:.2f}), mean AUC alone {mean_auc:.3f}")
        components.append(replace(component_of(normal, name), weight=weight))
    return Choice(tuple(components), _mean_auc(trials, components), table, tuple(steps), _count(normal))


Trials = Mapping[str, tuple[Scores, Scores]]  # kind -> scores of its normals and of its lesioned films


def _fitted_shares(trials: Trials, names: Sequence[str]) -> dict[str, float]:
    """Weights of the scores, none negative, of sum 1, that separate lesioned from normal films best over all kinds.

    A logistic regression in which every kind counts the same, and within each class every film.
    """
    values, classes, counts = [], [], []
    for reference, scores in trials.values():
        for films, is_lesioned in ((reference, 0.0), (scores, 1.0)):
            columns = [combine(films, [component_of(reference, name)]) for name in names]
            values.append(np.clip(np.stack(columns, axis=1), -_FAR, _FAR))
            classes.append(np.full(len(columns[0]), is_lesioned))
            counts.append(np.full(len(columns[0]), 1 / (2 * len(trials) * len(columns[0]))))
    x, sign, count = np.concatenate(values), 2 * np.concatenate(classes) - 1, np.concatenate(counts)

    def loss(parameters: Floats) -> tuple[float, Floats]:
        weights, offset = parameters[:-1], parameters[-1]
        margin = sign * (x @ weights + offset)
        apart = weights - weights.mean()
        slope = -count * sign / (1 + np.exp(np.clip(margin, -50, 50)))
        gradient = np.append(x.T @ slope + 2 * _PULL * apart, slope.sum())
        return float(count @ np.logaddexp(0, -margin) + _PULL * apart @ apart), gradient

    start = np.append(np.full(len(names), 1 / len(names)), 0.0)
    bounds = [(0.0, None)] * len(names) + [(None, None)]
    weights = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x[:-1]
    total = float(weights.sum())
    shares = weights / total if total > 0 else np.full(len(names), 1 / len(names))
    return dict(zip(names, shares.tolist(), strict=True))


def _candidates(table: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Scores that point the right way for every kind, and not only for their best ones; else the one closest to it.

    A score that falls with some kind of drawn lesion has learnt the others by heart rather than what normal is; so has
    one that is good at a few kinds and guesses at the rest. And one that falls with all of them could still help beside
    another, by taking away what they share: which amounts to flipping its sign.
    """
    allowed = [name for name in table if name not in NEVER_CHOSEN]
    upright = [name for name in allowed if min(table[name].values()) >= 0.5]
    steady = [name for name in upright if _without_best(table[name]) >= _BARELY]
    if steady:
        return steady
    return [max(upright or allowed, key=lambda name: (_without_best(table[name]), min(table[name].values())))]


def _without_best(aucs: Mapping[str, float]) -> float:
    """Mean AUC without the kinds that a score is best at."""
    rising = sorted(aucs.values())
    return float(np.mean(rising[: max(1, len(rising) - round(_BEST_KINDS * len(rising)))]))


def warnings(choice: Choice) -> Iterator[str]:
    """What a reader must know about the choice."""
    weak = choice.mean_auc
    if weak < 0.6:
        yield (
            f"the chosen score {choice.name} separates drawn lesions from normals with a mean AUC of only {weak:.3f}; "
            "do not expect much of it on real findings"
        )
    for name in choice.names:
        mean_auc = float(np.mean(list(choice.table[name].values())))
        if mean_auc < 0.5:
            yield (
                f"{name} only works sign-flipped: drawn lesions score lower than normals (mean AUC {mean_auc:.3f}); "
                "what it finds is an artefact, not a finding"
            )


def choice_to_json(choice: Choice) -> dict[str, Any]:
    return {
        "score": choice.name,
        "components": [asdict(component) for component in choice.components],
        "mean_auc": choice.mean_auc,
        "auc_by_kind": choice.table,
        "steps": list(choice.steps),
        "normal_films": choice.films,
        "asked": choice.asked,
    }


def choice_from_json(raw: Mapping[str, Any], known: Collection[str]) -> Choice:
    """What :func:`choice_to_json` gave, if its scores are among the ``known`` ones."""
    components = tuple(
        Component(str(entry["name"]), float(entry["centre"]), float(entry["spread"]), float(entry.get("weight", 1.0)))
        for entry in raw["components"]
    )
    unknown = [component.name for component in components if component.name not in known]
    if unknown:
        raise UserError(f"this detector uses the score {unknown[0]!r}, which this version of afire does not know.")
    table = {str(name): {str(k): float(v) for k, v in row.items()} for name, row in raw["auc_by_kind"].items()}
    return Choice(
        components,
        float(raw["mean_auc"]),
        table,
        tuple(map(str, raw["steps"])),
        int(raw["normal_films"]),
        bool(raw["asked"]),
    )


def _taken(normal: Scores, trials: Trials, names: Sequence[str], table: dict[str, dict[str, float]]) -> Choice:
    for name in names:
        if name not in normal:
            raise UserError(f"there is no score {name!r} here; these weights give {', '.join(normal)}.")
    components = [component_of(normal, name) for name in names]
    reached = _mean_auc(trials, components)
    steps = (f"asked for: {' + '.join(names)}, mean AUC {reached:.3f}",)
    return Choice(tuple(components), reached, table, steps, _count(normal), asked=True)


def component_of(normal: Scores, name: str) -> Component:
    """The score ``name`` in the spread of ``normal`` films."""
    values = np.asarray(normal[name], np.float64)
    low, middle, high = np.percentile(values, [16, 50, 84])
    return Component(name, float(middle), max(float(high - low) / 2, 1e-12))


def _separations(trials: Trials, name: str) -> dict[str, float]:
    return {kind: _auc(*films, [component_of(films[0], name)]) for kind, films in trials.items()}


def _mean_auc(trials: Trials, components: Sequence[Component]) -> float:
    """Over the kinds, each in the spread of its own normals."""
    aucs = []
    for reference, scores in trials.values():
        scaled = [replace(component_of(reference, component.name), weight=component.weight) for component in components]
        aucs.append(_auc(reference, scores, scaled))
    return float(np.mean(aucs))


def _auc(normal: Scores, abnormal: Scores, components: Sequence[Component]) -> float:
    low, high = combine(normal, components), combine(abnormal, components)
    return auc(np.concatenate([low, high]), np.r_[np.zeros(len(low)), np.ones(len(high))])


def _count(normal: Scores) -> int:
    return len(next(iter(normal.values())))
