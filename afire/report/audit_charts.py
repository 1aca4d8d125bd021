"""Geometry of the audit page's charts, in SVG user units: bars of AUC, and histograms of a fact in two classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afire.data.audit.features import Feature
from afire.data.audit.shortcuts import NOTABLE, SEVERE, Shortcut

_AUC_LEFT, _AUC_RIGHT = 0.3, 1.0
_LABELS_WIDTH, _PLOT_WIDTH, _ROW = 226.0, 300.0, 22.0
_BINS = 32


@dataclass(frozen=True)
class Bar:
    """One row: a bar from AUC 0.5 to the AUC, a whisker for the interval, and what is written beside them."""

    name: str
    level: str
    y: float
    x: float
    width: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class BarChart:
    """All facts of one label."""

    width: float
    height: float
    bars: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]
    chance: float
    limits: tuple[float, ...]
    plot_bottom: float
    labels_width: float = _LABELS_WIDTH


def bar_chart(shortcuts: Sequence[Shortcut]) -> BarChart:
    """Bars from the strongest to the weakest, those of several facts together last."""
    ordered = sorted(shortcuts, key=lambda one: (not one.single, -one.auc))
    bars = []
    for number, one in enumerate(ordered):
        left, right = sorted((_auc_x(0.5), _auc_x(one.auc)))
        direction = f", {one.direction} = present" if one.direction else ""
        text = f"{one.auc:.2f} ({one.low:.2f} to {one.high:.2f})"
        bars.append(
            Bar(
                name=one.feature + direction,
                level=one.level or "none",
                y=number * _ROW,
                x=left,
                width=max(right - left, 1.0),
                low=_auc_x(one.low),
                high=_auc_x(one.high),
                text=text,
            )
        )
    bottom = len(ordered) * _ROW
    ticks = tuple((_auc_x(value), f"{value:.1f}") for value in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0))
    limits = (_auc_x(NOTABLE), _auc_x(SEVERE))
    return BarChart(_LABELS_WIDTH + _PLOT_WIDTH + 134, bottom + 22, tuple(bars), ticks, _auc_x(0.5), limits, bottom)


def _auc_x(value: float) -> float:
    share = (min(max(value, _AUC_LEFT), _AUC_RIGHT) - _AUC_LEFT) / (_AUC_RIGHT - _AUC_LEFT)
    return round(_LABELS_WIDTH + share * _PLOT_WIDTH, 1)


@dataclass(frozen=True)
class Histogram:
    """Outlines of two classes as SVG paths, each class with area one."""

    name: str
    present: str
    absent: str
    left: str
    right: str
    width: float = 290.0
    height: float = 110.0


def histogram(feature: Feature, label: NDArray[np.float64]) -> Histogram | None:
    """A number in films with the label (1) and without (0); ``None`` for categories or an empty class."""
    if feature.is_category:
        return None
    values = feature.values.to_numpy(dtype=np.float64)
    known = np.isfinite(values) & np.isfinite(label)
    present, absent = values[known & (label == 1)], values[known & (label == 0)]
    if len(present) == 0 or len(absent) == 0:
        return None
    low, high = np.percentile(values[known], [0.5, 99.5])
    if not low < high:
        return None
    shares = [np.histogram(np.clip(part, low, high), _BINS, (low, high))[0] / len(part) for part in (present, absent)]
    top = max(float(share.max()) for share in shares)
    paths = [_outline(share / top, Histogram.width, Histogram.height) for share in shares]
    return Histogram(feature.name, paths[0], paths[1], format_number(float(low)), format_number(float(high)))


def _outline(heights: NDArray[np.float64], width: float, height: float) -> str:
    step = width / len(heights)
    points = [f"M0 {height:.1f}"]
    for number, share in enumerate(heights):
        points.append(f"V{height * (1 - share):.1f} H{(number + 1) * step:.1f}")
    return " ".join([*points, f"V{height:.1f} Z"])


def format_number(value: float) -> str:
    """Three significant digits, with thousands separated: ``1,640``, ``2.18 M``, ``0.482``."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
