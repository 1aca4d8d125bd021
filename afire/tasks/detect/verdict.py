"""What a table of detectors says, in sentences: whether learning beats the trivial rows, and what is upside down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afire.tasks.detect.evaluate import Line

CHANCE = 0.5


def verdicts(lines: Sequence[Line], best_trivial: str) -> list[str]:
    """Sentences, the most important first. ``lines`` begin with the chosen score."""
    chosen = lines[0]
    best = next(line for line in lines if line.name == best_trivial)
    found = [_against(chosen, best), *_upside_down(lines)]
    better = [line for line in lines if line.kind == "single" and line.against is not None and line.against.low > 0]
    if chosen.against is not None and chosen.against.low <= 0 and better:
        names = ", ".join(line.name for line in better)
        found.append(
            f"{names} would have beaten {best_trivial} here; that is known only now, with test labels, and is no result"
        )
    return found


def _against(chosen: Line, best: Line) -> str:
    ours, theirs, difference = chosen.metrics["auc"].mean, best.metrics["auc"].mean, chosen.against
    assert difference is not None
    numbers = f"{difference.value:+.3f}, 95 % interval {difference.low:+.3f} to {difference.high:+.3f}"
    words = f"the chosen score {chosen.meaning} (AUC {ours:.3f})"
    other = f"the best trivial detector, {best.name} (AUC {theirs:.3f})"
    if difference.low > 0:
        return f"{words} beats {other}: {numbers}"
    if difference.high < 0:
        return f"{words} does not beat the trivial detectors: it is worse than {other}: {numbers}"
    return f"{words} does not beat {other}: {numbers}"


def is_upside_down(line: Line) -> bool:
    """Whether its AUC, as it is printed, lies below chance."""
    return round(line.metrics["auc"].mean, 3) < CHANCE


def _upside_down(lines: Sequence[Line]) -> list[str]:
    found = []
    wrong = [f"{line.name} ({line.metrics['auc'].mean:.3f})" for line in lines if is_upside_down(line)]
    if wrong:
        found.append(f"upside down, normal films score higher: {', '.join(wrong)}; no score is turned round")
    for line in lines:
        auc = line.metrics["auc"].mean
        if line.kind != "trivial" and line.drawn_auc < CHANCE < auc:
            found.append(
                f"{line.name} reaches {auc:.3f} here only because it is upside down: drawn lesions score lower than "
                f"normals (AUC {line.drawn_auc:.3f}), so what it finds is an artefact, such as smoother films"
            )
    return found
