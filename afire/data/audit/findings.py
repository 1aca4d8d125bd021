"""What an audit reports: findings with a level, a message and the films concerned; and the AUC that some are judged by.

N films, B bootstrap draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Level = Literal["error", "warning", "notice"]
LEVELS: tuple[Level, ...] = ("error", "warning", "notice")
"""From worst to mildest. An error invalidates results, a warning may, a notice is worth knowing."""
Number = int | float | str | None
_DRAWS = 500
_ROWS_AT_ONCE = 4_000_000  # entries of a draws x films matrix, to bound memory on large sets


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    ``groups`` holds the films, as rows of the manifest: one film to a group, or the films that belong together (a pair
    of duplicates, the films of one patient). ``notes`` has one short text for each group, or nothing.
    """

    level: Level
    kind: str
    message: str
    groups: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()
    numbers: Mapping[str, Number] = field(default_factory=dict)

    @property
    def films(self) -> list[int]:
        """Every film concerned, once, in order of appearance."""
        return list(dict.fromkeys(row for group in self.groups for row in group))


def single(rows: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of one film each."""
    return tuple((int(row),) for row in rows)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; within a level in the order in which the checks ran."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def count_levels(findings: Sequence[Finding]) -> dict[Level, int]:
    """How many findings there are of each level."""
    return {level: sum(finding.level == level for finding in findings) for level in LEVELS}


def verdict(findings: Sequence[Finding]) -> str:
    """A message about the whole set."""
    counts = count_levels(findings)
    if counts["error"]:
        worst = [finding for finding in findings if finding.level == "error"]
        if all(finding.kind == "shortcut" for finding in worst):
            labels = " or ".join(str(finding.numbers["label"]) for finding in worst)
            return f"A result on {labels} can be explained without disease; report a metadata-only row beside it."
        return "Results on this set would not be valid until the errors are dealt with."
    if counts["warning"]:
        return "Nothing was found that invalidates results; look at the warnings before training."
    return "Nothing was found that invalidates results."


def it_or_them(count: int) -> str:
    """The word for ``count`` films that were just named."""
    return "it" if count == 1 else "them"


def films_in_words(count: int) -> str:
    """``1 film``, ``1,234 films``."""
    return f"{count:,} film{'' if count == 1 else 's'}"


def auc(scores_N: NDArray[np.float64], positive_N: NDArray[np.bool_]) -> float:
    """Chance that a positive film scores higher than a negative one, ties counting half. NaN without both classes."""
    return float(weighted_auc(scores_N, positive_N, np.ones((1, len(scores_N))))[0])


def weighted_auc(
    scores_N: NDArray[np.float64], positive_N: NDArray[np.bool_], weights_BN: NDArray[np.float64]
) -> NDArray[np.float64]:
    """AUC (B,) for each row of film weights; NaN where a class has no weight."""
    order = np.argsort(scores_N, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores_N[order]) != 0])
    positive = positive_N[order]
    weights = weights_BN[:, order]
    positives = np.add.reduceat(weights * positive, starts, axis=1)  # weight at each distinct score
    negatives = np.add.reduceat(weights * ~positive, starts, axis=1)
    below = np.cumsum(negatives, axis=1) - negatives / 2
    total = positives.sum(axis=1) * negatives.sum(axis=1)
    wins = (positives * below).sum(axis=1)
    areas: NDArray[np.float64] = np.divide(wins, total, out=np.full(len(weights), np.nan), where=total > 0)
    return areas


def auc_interval(
    scores_N: NDArray[np.float64],
    positive_N: NDArray[np.bool_],
    patients_N: NDArray[np.object_],
    generator: np.random.Generator,
) -> tuple[float, float]:
    """95 % bootstrap interval: patients are drawn with replacement, each with all of their films."""
    names, patient = np.unique(patients_N.astype(str), return_inverse=True)
    at_once = max(1, _ROWS_AT_ONCE // max(len(scores_N), 1))
    values = []
    for start in range(0, _DRAWS, at_once):
        draws = min(at_once, _DRAWS - start)
        drawn = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
        values.append(weighted_auc(scores_N, positive_N, drawn[:, patient].astype(np.float64)))
    low, high = np.nanpercentile(np.concatenate(values), [2.5, 97.5])
    return float(low), float(high)
