"""From a film of any shape to a square one, and masks and boxes with the same geometry.

Three ways, a setting (``image.fit``):

    squash      the whole film, sides scaled separately; nothing is lost, proportions are
    letterbox   the whole film, proportions kept, centred on black
    crop        the central square; proportions kept, the ends of the long side are lost

H, W are the film's height and width, S the side of the square.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from afire.errors import UserError

FitMode = Literal["squash", "letterbox", "crop"]
FIT_MODES: tuple[FitMode, ...] = ("squash", "letterbox", "crop")
Box = tuple[float, float, float, float]
MaskType = TypeVar("MaskType", np.bool_, np.uint8)


class _Placement(NamedTuple):
    """Which rectangle of the film is shown, and which rectangle of the square shows it; both in whole pixels."""

    left: int
    top: int
    width: int
    height: int
    to_left: int
    to_top: int
    to_width: int
    to_height: int


def fit_square(film: NDArray[np.float32], size: int, mode: FitMode = "squash") -> NDArray[np.float32]:
    """Resize a film (H, W) in [0,1] to (size, size), antialiased, still in [0,1].

    The filter is bicubic, widened by the factor of reduction (so nothing aliases); its overshoot at sharp edges is
    clipped. No shortcut by block averages first: it is faster on large films, but it would filter them differently
    from small ones, by up to five grey levels of 255 at edges.
    """
    place = _place(film.shape, size, mode)
    source = (place.left, place.top, place.left + place.width, place.top + place.height)
    image = Image.fromarray(np.ascontiguousarray(film, dtype=np.float32))
    resized = np.asarray(image.resize((place.to_width, place.to_height), Image.Resampling.BICUBIC, source))
    square = np.zeros((size, size), np.float32)
    np.clip(resized, 0.0, 1.0, out=_target(square, place))
    return square


def fit_mask(mask: NDArray[MaskType], size: int, mode: FitMode = "squash") -> NDArray[MaskType]:
    """Resize a mask (H, W) to (size, size): a pixel is inside when more than half of the area it covers is.

    A ``bool`` mask stays ``bool``. In a ``uint8`` mask every bit is a mask of its own (so 0/1, 0/255 and bit flags
    all keep their values). What ``letterbox`` adds is outside.
    """
    place = _place(mask.shape, size, mode)
    shown = mask[place.top : place.top + place.height, place.left : place.left + place.width]
    square = np.zeros((size, size), mask.dtype)
    target = _target(square, place)
    if mask.dtype == np.bool_:
        target[...] = _area_share(shown != 0, place.to_height, place.to_width) > 0.5
        return square
    for bit in range(8):
        inside = (shown & np.uint8(1 << bit)) != 0
        if inside.any():
            majority = _area_share(inside, place.to_height, place.to_width) > 0.5
            target |= majority.astype(np.uint8) << np.uint8(bit)
    return square


def fit_box(box: Box, height: int, width: int, mode: FitMode = "squash") -> Box | None:
    """Where a box (x, y, w, h), in fractions of a film of ``height`` x ``width``, lies in the square film.

    Fractions again, clipped to the square; ``None`` when nothing of it is left. With ``letterbox`` the answer is off by
    less than a pixel of the square, because the film is placed on whole pixels.
    """
    _check(height, width, 1, mode)
    x, y, w, h = box
    side_x, side_y, start_x, start_y = float(width), float(height), 0.0, 0.0  # of the square, in film pixels
    if mode == "letterbox":
        side_x = side_y = float(max(height, width))
        start_x, start_y = (width - side_x) / 2, (height - side_y) / 2
    elif mode == "crop":
        place = _place((height, width), 1, mode)
        side_x, side_y, start_x, start_y = place.width, place.height, place.left, place.top
    left, right = (_clip01((edge * width - start_x) / side_x) for edge in (x, x + w))
    top, bottom = (_clip01((edge * height - start_y) / side_y) for edge in (y, y + h))
    if right <= left or bottom <= top:
        return None
    return left, top, right - left, bottom - top


def _clip01(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _place(shape: tuple[int, ...], size: int, mode: FitMode) -> _Placement:
    if len(shape) != 2:
        raise ValueError(f"a film is (H, W); this array has shape {shape}")
    height, width = shape
    _check(height, width, size, mode)
    if mode == "squash":
        return _Placement(0, 0, width, height, 0, 0, size, size)
    if mode == "crop":
        side = min(height, width)
        return _Placement((width - side) // 2, (height - side) // 2, side, side, 0, 0, size, size)
    scale = size / max(height, width)
    to_width, to_height = max(1, round(width * scale)), max(1, round(height * scale))
    to_left, to_top = (size - to_width) // 2, (size - to_height) // 2
    return _Placement(0, 0, width, height, to_left, to_top, to_width, to_height)


def _check(height: int, width: int, size: int, mode: str) -> None:
    if mode not in FIT_MODES:
        raise UserError(f"image.fit {mode!r} is not one of {', '.join(FIT_MODES)}.")
    if height < 1 or width < 1 or size < 1:
        raise ValueError(f"cannot fit a film of {width} x {height} pixels into a square of side {size}")


def _target(square: NDArray[MaskType] | NDArray[np.float32], place: _Placement):  # type: ignore[no-untyped-def]
    return square[place.to_top : place.to_top + place.to_height, place.to_left : place.to_left + place.to_width]


def _area_share(inside: NDArray[np.bool_], height: int, width: int) -> NDArray[np.float32]:
    """Share (height, width) of each new pixel's area that is inside; exact for any ratio of sizes."""
    rows, columns = _overlaps(inside.shape[0], height), _overlaps(inside.shape[1], width)
    share: NDArray[np.float32] = rows @ inside.astype(np.float32) @ columns.T
    return share


def _overlaps(old: int, new: int) -> NDArray[np.float32]:
    """Matrix (new, old): which share of each new cell each old cell covers; rows sum to one."""
    step = old / new
    start = np.arange(new)[:, None] * step
    cell = np.arange(old)[None, :]
    overlap = np.minimum(start + step, cell + 1) - np.maximum(start, cell)
    share: NDArray[np.float32] = (np.clip(overlap, 0.0, None) / step).astype(np.float32)
    return share
