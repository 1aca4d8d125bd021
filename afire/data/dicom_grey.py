"""The DICOM grey-scale: from stored numbers to [0,1], in the standard's order.

    stored value -> modality LUT or rescale -> VOI LUT or window -> [0,1] -> 1 - x for MONOCHROME1

(PS3.3 C.11.1, C.11.2 and C.7.6.3.1.2.) The inversion comes last and in [0,1]: a window's centre is a number from
before it, so a film inverted first would be shown through the wrong part of its range.

pydicom has functions for the middle steps. They return the range of the input rather than [0,1], turn a film over when
the rescale slope is negative, and wrap around where an 8-bit VOI LUT follows a 12-bit film, so the few lines are here;
the tests compare them with pydicom's where those hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from afire.data.film import Film, stretch

Voi = Literal["auto", "lut", "window", "none"]
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Lut:
    """A lookup table: ``entries[value - first]``, held at both ends; an entry has ``bits`` bits."""

    first: int
    entries: NDArray[np.uint16]
    bits: int

    @property
    def white(self) -> int:
        """The largest output. Some writers declare fewer bits than they use, or none; then the entries decide."""
        declared = 2**self.bits - 1 if self.bits in range(1, 17) else 1
        return int(max(declared, self.entries.max()))

    def __call__(self, values: Values) -> Values:
        index = np.clip(np.rint(values) - self.first, 0, len(self.entries) - 1).astype(np.intp)
        mapped: Values = self.entries[index].astype(np.float64)
        return mapped


@dataclass(frozen=True)
class Window:
    """Window centre and width with their function: LINEAR, LINEAR_EXACT or SIGMOID."""

    centre: float
    width: float
    function: str = "LINEAR"

    @property
    def usable(self) -> bool:
        """Whether the standard allows it. Files with a width of 0 exist; their window is ignored."""
        least = 1.0 if self.function == "LINEAR" else np.nextafter(0.0, 1.0)
        supported = self.function in ("LINEAR", "LINEAR_EXACT", "SIGMOID")
        return supported and bool(np.isfinite([self.centre, self.width]).all()) and self.width >= least

    def __call__(self, values: Values) -> Values:
        """Values in [0,1]."""
        if self.function == "SIGMOID":
            return 1.0 / (1.0 + np.exp(np.clip(-4.0 * (values - self.centre) / self.width, -700.0, 700.0)))
        # The half and the one of LINEAR count whole levels: 256 levels are 255 steps wide (C.11.2.1.2.1).
        exact = self.function == "LINEAR_EXACT"
        centre, width = (self.centre, self.width) if exact else (self.centre - 0.5, self.width - 1.0)
        if width == 0.0:
            return (values > centre).astype(np.float64)
        return np.clip((values - centre) / width + 0.5, 0.0, 1.0)


@dataclass(frozen=True)
class GreyScale:
    """Everything in a header that turns stored numbers into grey."""

    bits_stored: int
    signed: bool = False
    slope: float = 1.0
    intercept: float = 0.0
    modality_lut: Lut | None = None
    voi_lut: Lut | None = None
    window: Window | None = None
    padding: tuple[int, int] | None = None
    """Lowest and highest stored number that mean 'no film here'."""
    monochrome1: bool = False

    def stored_range(self) -> tuple[int, int]:
        """Smallest and largest number that the stored bits can hold."""
        if self.signed:
            return -(2 ** (self.bits_stored - 1)), 2 ** (self.bits_stored - 1) - 1
        return 0, 2**self.bits_stored - 1

    def to_modality(self, stored: Values) -> Values:
        """Stored numbers to the numbers that windows are given in."""
        if self.modality_lut is not None:
            return self.modality_lut(stored)
        return stored * self.slope + self.intercept


def to_film(pixels: NDArray[Any], scale: GreyScale, voi: Voi) -> Film:
    """Stored pixels (H, W), finite, to a film (H, W) in [0,1] with black = 0."""
    with np.errstate(over="ignore", invalid="ignore"):  # absurd slopes and windows; the caller checks the range
        return _to_film(pixels, scale, voi)


def _to_film(pixels: NDArray[Any], scale: GreyScale, voi: Voi) -> Film:
    low, high = _data_range(pixels, scale.padding)
    smallest, largest = float(pixels.min()), float(pixels.max())
    if pixels.dtype.kind in "iu" and largest - smallest < 2**16:
        # Each stored number is looked up in a table of all of them: exact, and faster than arithmetic on every pixel.
        first = int(smallest)
        levels = np.arange(first, int(largest) + 1, dtype=np.float64)
        table = _display(levels, scale, voi, low, high, is_float=False)
        index = pixels if first == 0 else pixels.astype(np.int64) - first
        film: Film = table[index]
        return film
    return _display(pixels.astype(np.float64), scale, voi, low, high, is_float=pixels.dtype.kind == "f")


def _display(stored: Values, scale: GreyScale, voi: Voi, low: float, high: float, is_float: bool) -> Film:
    values = scale.to_modality(stored)
    window = scale.window if scale.window is not None and scale.window.usable else None
    if voi in ("auto", "lut") and scale.voi_lut is not None:
        grey = scale.voi_lut(values) / scale.voi_lut.white
    elif voi in ("auto", "window") and window is not None:
        grey = window(values)
    else:
        grey = stretch(values, *_range_without_voi(scale, voi, low, high, is_float)).astype(np.float64)
    if scale.monochrome1:
        grey = 1.0 - grey
    return grey.astype(np.float32)


def _range_without_voi(scale: GreyScale, voi: Voi, low: float, high: float, is_float: bool) -> tuple[float, float]:
    """What becomes black and white when no VOI is applied.

    ``none`` asks for the full range of the stored bits. Otherwise 8-bit films use that too, because they were made for
    display; deeper ones rarely fill their bits (12-bit detectors in files that say 16 would be nearly black), so
    the film's own range without padding is used.
    """
    full = not is_float and (voi == "none" or scale.bits_stored <= 8)
    if full and scale.modality_lut is not None:
        return 0.0, float(scale.modality_lut.white)
    low, high = scale.stored_range() if full else (low, high)
    if scale.modality_lut is None:
        ends = scale.to_modality(np.array([low, high], dtype=np.float64))
    else:  # a table need not rise, so the ends of its input are not the ends of its output
        ends = scale.to_modality(np.arange(low, high + 1, dtype=np.float64))
    return float(ends.min()), float(ends.max())


def _data_range(pixels: NDArray[Any], padding: tuple[int, int] | None) -> tuple[float, float]:
    """Smallest and largest stored number that is film; of everything if all of it is padding."""
    if padding is not None:
        film = pixels[(pixels < padding[0]) | (pixels > padding[1])]
        if film.size:
            return float(film.min()), float(film.max())
    return float(pixels.min()), float(pixels.max())
