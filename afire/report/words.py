"""How numbers of results are written, in tables, pages and figures alike."""

from __future__ import annotations

import math

from afire.tasks.results import Estimate

METRIC_WORDS = {
    "auc": "AUC",
    "average_precision": "average precision",
    "accuracy": "accuracy",
    "f1": "F1",
    "dice": "Dice",
    "dice_positive": "Dice of positives",
    "iou": "IoU",
    "iou_positive": "IoU of positives",
}
_SHORT = {"average_precision": "AP", "accuracy": "ACC", "dice_positive": "Dice+", "iou_positive": "IoU+"}
DISCLAIMER = "Research software, not a medical device."


def metric_word(name: str) -> str:
    """``average_precision`` -> ``average precision``; known abbreviations in their usual spelling."""
    return METRIC_WORDS.get(name, name.replace("_", " "))


def short_word(name: str) -> str:
    """The same for a narrow column: ``AP``, ``ACC``."""
    return _SHORT.get(name, metric_word(name))


def number(value: float, digits: int = 3) -> str:
    """``0.853``, or a dash for a number that does not exist."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def mean_sd(estimate: Estimate, digits: int = 3) -> str:
    """``0.853 ± 0.004``; one run has no sd."""
    text = number(estimate.mean, digits)
    return text if math.isnan(estimate.sd) else f"{text} ± {estimate.sd:.{digits}f}"


def interval_text(estimate: Estimate, digits: int = 3) -> str:
    """``0.821 to 0.880``, or nothing."""
    return "" if math.isnan(estimate.low) else f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"


def p_text(p: float) -> str:
    """``0.031``, ``< 0.001`` or a dash."""
    return "–" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"
