"""What objects say about a film, whichever kind they are: score, p-value, region, model, or why there is no score.

Shapes: H x W pixels of a film, h x w of its region, small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import label

from afire._version import __version__
from afire.detect.base import DISCLAIMER
from afire.detect.findings import OUT_OF_DOMAIN, SCORED, FilmResult, Judgement, Rule

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Region:
    """The connected area around the hottest place that the overlay colours, small, in the film's proportions."""

    mask: Mask  # (h, w)

    @classmethod
    def of(cls, levels: NDArray[np.uint8]) -> Region | None:
        """From steps of the heat's scale (h, w), 0 = below it; nothing when nothing stands out."""
        if not levels.any():
            return None
        areas, _ = label(levels > 0)
        return cls(areas == areas.flat[int(levels.argmax())])

    def box(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Left, top, right, bottom on a film of that size."""
        rows, columns = np.nonzero(self.mask)
        down, across = height / self.mask.shape[0], width / self.mask.shape[1]
        return (
            float(columns.min() * across),
            float(rows.min() * down),
            float((columns.max() + 1) * across),
            float((rows.max() + 1) * down),
        )

    def on_film(self, height: int, width: int) -> Mask:
        """(H, W), each pixel as the small one it lies in."""
        rows = np.arange(height) * self.mask.shape[0] // height
        columns = np.arange(width) * self.mask.shape[1] // width
        return self.mask[np.ix_(rows, columns)]


@dataclass(frozen=True)
class Finding:
    """A film's result and its place among the calibration normals; no judgement means that it was not scored."""

    result: FilmResult
    judgement: Judgement | None
    region: Region | None
    model_hash: str

    @classmethod
    def of(cls, result: FilmResult, rule: Rule, region: Region | None, model_hash: str) -> Finding:
        return cls(result, rule.judge(result), region if result.status == SCORED else None, model_hash)

    @classmethod
    def none(cls) -> Finding:
        """Of no film: what an object of a kind is first made of."""
        return cls(FilmResult(0, "", OUT_OF_DOMAIN), None, None, "")

    @property
    def reason(self) -> str:
        """Why there is no score."""
        return "; ".join(self.result.objections)

    @property
    def words(self) -> str:
        """The finding in one line."""
        if self.judgement is None:
            return f"out of domain, not scored: {self.reason}"
        return f"score {self.result.score:.3g}, p-value {self.judgement.p_value:.3g}; {self.result.region}"

    @property
    def derivation(self) -> str:
        """How an object came about, for its header."""
        return f"afire {__version__}, model {self.model_hash[:12]}: {self.words}. {DISCLAIMER}"
