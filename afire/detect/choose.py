"""Choosing a score without a label: how well each tells held-out normals from the same normals with drawn lesions.

The kinds differ in texture, size, place and strength, and most are unlike the lesions of pre-training, so that a score
is not chosen for having learnt one kind by heart. Only scores that rise with every kind are looked at; of these the
one with the highest mean AUC over the kinds is taken. A second or third is added, with equal weight in the spread of
normals, only where the mean AUC gains enough.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
GAIN = 0.01  # of the mean AUC: less is noise at the size of a held-out subset
DRAWN = 200  # lesioned films of each kind, at least: few held-out normals are drawn on several times
MOST = 3  # scores in a combination
NEVER_CHOSEN = ("paper",)  # a direction that is known to be wrong is shown, and not chosen


@dataclass(frozen=True)
class Component:
    """A score within a combination, brought to the middle and the spread of normals.

    Median, and half the range that holds 68 % of them (an sd where they are Gaussian): one odd normal film would
    stretch a plain sd so far that the score no longer counts beside the others.
    """

    name: str
    centre: float
    spread: float


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
        """The film's score (N,): the mean of its components in the spread of normals."""
        return combine(scores, self.components)


def unchosen(name: str) -> Choice:
    """A score as it is, until a fit has chosen."""
    return Choice((Component(name, 0.0, 1.0),), float("nan"))


def combine(scores: Scores, components: Sequence[Component]) -> Floats:
    """Mean of the components (N,), each in the spread of normals."""
    values = [(np.asarray(scores[c.name], np.float64) - c.centre) / c.spread for c in components]
    joined: Floats = np.mean(values, axis=0)
    return joined


def choose(normal: Scores, lesioned: Mapping[str, Scores], asked: Sequence[str] | None = None) -> Choice:
    """Pick a score, or take the ``asked`` ones; ``lesioned`` holds the scores of each kind of lesion."""
    table = {name: _separations(normal, lesioned, _component(normal, name)) for name in normal}
    if asked is not None:
        return _taken(normal, lesioned, asked, table)
    candidates = _candidates(table)
    chosen: list[Component] = []
    best, steps = 0.0, []
    while len(chosen) < MOST:
        gains = {
            name: _mean_auc(normal, lesioned, [*chosen, _component(normal, name)])
            for name in candidates
            if name not in {component.name for component in chosen}
        }
        if not gains:
            break
        name = max(gains, key=lambda candidate: (gains[candidate], -candidates.index(candidate)))
        if chosen and gains[name] < best + GAIN:
            steps.append(f"{name} would add {gains[name] - best:+.3f}: not enough")
            break
        steps.append(f"{name}: mean AUC {gains[name]:.3f}")
        chosen.append(_component(normal, name))
        best = gains[name]
    return Choice(tuple(chosen), best, table, tuple(steps), _count(normal))


def _candidates(table: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Scores that point the right way for every kind of lesion; where none does, the one that comes closest.

    A score that falls with some kind of drawn lesion has learnt the others by heart rather than what normal is. And one
    that falls with all of them could still help beside another, by taking away what they share: that is flipping its
    sign by another name.
    """
    allowed = [name for name in table if name not in NEVER_CHOSEN]
    upright = [name for name in allowed if min(table[name].values()) >= 0.5]
    return upright or [max(allowed, key=lambda name: min(table[name].values()))]


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
        Component(str(entry["name"]), float(entry["centre"]), float(entry["spread"])) for entry in raw["components"]
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


def _taken(
    normal: Scores, lesioned: Mapping[str, Scores], asked: Sequence[str], table: dict[str, dict[str, float]]
) -> Choice:
    for name in asked:
        if name not in normal:
            raise UserError(f"there is no score {name!r} here; these weights give {', '.join(normal)}.")
    components = [_component(normal, name) for name in asked]
    reached = _mean_auc(normal, lesioned, components)
    steps = (f"asked for: {' + '.join(asked)}, mean AUC {reached:.3f}",)
    return Choice(tuple(components), reached, table, steps, _count(normal), asked=True)


def _component(normal: Scores, name: str) -> Component:
    values = np.asarray(normal[name], np.float64)
    low, middle, high = np.percentile(values, [16, 50, 84])
    return Component(name, float(middle), max(float(high - low) / 2, 1e-12))


def _separations(normal: Scores, lesioned: Mapping[str, Scores], component: Component) -> dict[str, float]:
    return {kind: _auc(normal, scores, [component]) for kind, scores in lesioned.items()}


def _mean_auc(normal: Scores, lesioned: Mapping[str, Scores], components: Sequence[Component]) -> float:
    return float(np.mean([_auc(normal, scores, components) for scores in lesioned.values()]))


def _auc(normal: Scores, abnormal: Scores, components: Sequence[Component]) -> float:
    low, high = combine(normal, components), combine(abnormal, components)
    return auc(np.concatenate([low, high]), np.r_[np.zeros(len(low)), np.ones(len(high))])


def _count(normal: Scores) -> int:
    return len(next(iter(normal.values())))
