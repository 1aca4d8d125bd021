"""Where lesions may lie, and the random numbers that decide it.

Draws are 24-bit integers, from a generator or from a key, not floats, so that "the k-th of n pixels" is exact integer
arithmetic: the same lesion on every device, whatever the batch around it. Places are bright pixels (Otsu's threshold)
or the lung field, the dark region that Otsu finds inside the body: rough, for placing lesions, not anatomy.

A place of the chest is named by the patient's side and a zone, for a frontal film that hangs as usual: the patient's
right lung is on the left of the film. Zones are thirds of the height of the lung field, or of the film where none is
found.

Shapes: B images of H x W, V views, S lesion slots, D = len(Draw) draws for each lesion; lungs on grids of G x G cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

REFERENCE_SIZE = 224  # sizes in the settings are pixels of a film this large
DRAW_BITS = 24  # what a float32 holds exactly
# Constants of splitmix64 (Steele, Lea and Flood 2014), as the signed integers torch knows.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)
_BINS = 256
_GRID = 56
_ROW = (1 << _GRID) - 1  # a packed row of true cells
_CENTRE = (0.15, 0.80, 0.15, 0.85)  # top, bottom, left, right of the area whose Otsu threshold separates the lungs
_INSIDE = (0.04, 0.95, 0.04, 0.96)  # dark cells beyond this frame are outside the body
_GAP = 2  # darkness narrower than 2 * _GAP + 1 cells does not let the outside in
_SMALLEST_SHARE = 0.02  # of the film; a smaller field is none
SIDES = "Sides are the patient's: the right lung is on the left of the film."
_FIELD_SIDE = 56  # what the lung field is found on anyway
_IN_LUNG = 0.25  # share of a cell that must be lung
_WHOLE_FILM = 0.9  # a lung field this large is none
_SMALLEST_LUNG = 0.02  # of the film, on either side of its middle
_RIM, _BELOW = 0.065, 0.15  # how far the chest reaches beyond the lungs seen in it, as a share of the film
_ZONES = ("upper", "middle", "lower")


class Draw(IntEnum):
    """What each random number of a lesion decides. Append only: the order is part of what a seed means."""

    COUNT = 0  # lesions in the film; read from slot 0 only
    TEXTURE = 1  # which highlighted pixel the texture window is centred on
    WINDOW_X = 2  # where the window lies in a film without highlight
    WINDOW_Y = 3
    WIDTH = 4
    HEIGHT = 5
    AMPLITUDE = 6
    PLACE_X = 7
    PLACE_Y = 8
    LUNG = 9  # which lung pixel the lesion is centred on
    ANGLE = 10
    KIND = 11  # texture or haze
    PHASE = 12  # of the first of the outline's harmonics; the others follow
    PHASE_3 = 13
    PHASE_4 = 14
    PHASE_5 = 15


def drawn(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Draws (B, V, S, D) from a generator, on the generator's device; ``shape`` is (B, V, S)."""
    return torch.randint(0, 1 << DRAW_BITS, (*shape, len(Draw)), generator=generator, device=generator.device)


def keyed(seed: int, epoch: int, indices: Tensor | Sequence[int], views: int, slots: int) -> Tensor:
    """Draws (B, V, S, D) that depend on nothing but (seed, epoch, sample index, view).

    A key opens a splitmix64 stream and the n-th number of that stream is the key of the next level:
    seed -> epoch -> sample -> view -> slot -> draw. A slot's draws therefore do not depend on how many slots there
    are. Computed on the CPU, so that every device sees the same numbers.
    """
    samples = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
    key = nth_of_stream(torch.tensor(_signed(seed)), torch.tensor(_signed(epoch)))
    for level in (samples, torch.arange(views), torch.arange(slots), torch.arange(len(Draw))):
        key = nth_of_stream(key.unsqueeze(-1), level)
    return _shift_right(key, 64 - DRAW_BITS)


def nth_of_stream(state: Tensor, n: Tensor) -> Tensor:
    """The ``n``-th number of the splitmix64 stream that starts at ``state``; int64, wrapping around."""
    mixed = state + (n + 1) * _GOLDEN
    mixed = (mixed ^ _shift_right(mixed, 30)) * _MIX_A
    mixed = (mixed ^ _shift_right(mixed, 27)) * _MIX_B
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own ``>>`` would copy the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """A Python integer as the int64 with the same low 64 bits."""
    low = value & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low


def below(draw: Tensor, limit: Tensor | int) -> Tensor:
    """Uniform integer in [0, limit), exact; 0 where ``limit`` is 0."""
    return (draw * limit) >> DRAW_BITS


def unit(draw: Tensor) -> Tensor:
    """Uniform float32 in [0, 1)."""
    return draw.to(torch.float32) * 2.0**-DRAW_BITS


def grey(images: Tensor) -> Tensor:
    """Films (B, C, H, W) -> (B, H, W), float32: the mean of their channels."""
    exact = images if images.dtype in (torch.float32, torch.float64) else images.to(torch.float32)
    return exact.mean(1).to(torch.float32) if images.shape[1] > 1 else exact[:, 0].to(torch.float32)


def scaled(size_at_224: float, height: int, width: int) -> int:
    """A size in pixels of this film, at least 1. The shorter side counts: lesions are not stretched with the film."""
    return max(1, round(size_at_224 * min(height, width) / REFERENCE_SIZE))


def otsu_threshold(gray_BHW: Tensor) -> Tensor:
    """The grey value (B,) that best splits each film in two: the largest variance between the classes.

    The 256 bins span each film's own range, so a dim 16-bit film is split as finely as a bright one. A film of one
    value gets that value: nothing in it lies above.
    """
    return _split(gray_BHW)[0]


def otsu_with_bright_level(gray_BHW: Tensor) -> tuple[Tensor, Tensor]:
    """Otsu's threshold (B,) and the mean grey value (B,) above it, to within half a bin."""
    return _split(gray_BHW)


def _split(gray_BHW: Tensor) -> tuple[Tensor, Tensor]:
    flat = gray_BHW.flatten(1)
    low, high = flat.amin(1), flat.amax(1)
    width = (high - low) / _BINS
    counts = _histogram(flat, low, width)

    # Whole-number sums, exact in float64: empty bins tie exactly and the first wins everywhere. (MPS has no float64;
    # there the threshold may move by a bin.)
    exact = torch.float32 if flat.device.type == "mps" else torch.float64
    moments = counts * torch.arange(_BINS, device=flat.device)
    weight_below, sum_below = counts.cumsum(1)[:, :-1].to(exact), moments.cumsum(1)[:, :-1].to(exact)
    weight, total = flat.shape[1], moments.sum(1, keepdim=True).to(exact)
    weight_above = weight - weight_below
    spread = (total * weight_below - weight * sum_below).square() / (weight_below * weight_above).clamp(min=1)
    best = spread.argmax(1, keepdim=True)

    threshold = low + (best[:, 0] + 1) * width
    mean_bin = (total - sum_below.gather(1, best)) / weight_above.gather(1, best).clamp(min=1)
    bright = low + (mean_bin[:, 0].to(flat.dtype) + 0.5) * width
    single_valued = width <= 0
    return torch.where(single_valued, high, threshold), torch.where(single_valued, high, bright)


def _histogram(flat_BN: Tensor, low_B: Tensor, width_B: Tensor) -> Tensor:
    scale = 1 / width_B.clamp(min=torch.finfo(torch.float32).tiny)
    bins = (flat_BN - low_B[:, None]).mul_(scale[:, None]).to(torch.int32)
    films, wide = len(flat_BN), _BINS + 1
    bins += torch.arange(films, dtype=torch.int32, device=bins.device)[:, None] * wide
    counts = torch.bincount(bins.view(-1), minlength=films * wide).view(films, wide)
    # A film's largest value opens a bin of its own, which belongs to the last: cheaper than to limit every pixel.
    counts[:, -2] += counts[:, -1]
    return counts[:, :-1]


class PixelPicker:
    """Picks uniformly among the chosen pixels of each film, without listing them.

    Counting by rows first means that a draw looks at one row of the film, not at all of it. ``chosen_BHW`` is bool, or
    float32 with 1 for a chosen pixel and 0 for another.
    """

    def __init__(self, chosen_BHW: Tensor) -> None:
        self.chosen_BHW = chosen_BHW
        kind = torch.float32 if chosen_BHW.is_floating_point() else torch.int32  # both count a row exactly
        self.cumulative_BH = chosen_BHW.sum(2, dtype=kind).to(torch.int32).cumsum(1)

    @classmethod
    def above(cls, gray_BHW: Tensor, threshold_B: Tensor) -> PixelPicker:
        """Among the pixels above each film's threshold. To write these as floats and count them takes a third of the
        time that bools take."""
        return cls(torch.gt(gray_BHW, threshold_B[:, None, None], out=torch.empty_like(gray_BHW)))

    @property
    def count(self) -> Tensor:
        """Number of chosen pixels (B,), int64."""
        return self.cumulative_BH[:, -1]

    def pick(self, draw_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Column and row, each (B, K), of one chosen pixel for each draw; (0, 0) in a film without any."""
        rank = below(draw_BK, self.count[:, None])
        row = torch.searchsorted(self.cumulative_BH, rank, right=True).clamp(max=self.chosen_BHW.shape[1] - 1)
        before = torch.nn.functional.pad(self.cumulative_BH, (1, 0)).gather(1, row)
        films = torch.arange(len(rank), device=rank.device)[:, None]
        along_row = self.chosen_BHW[films, row].cumsum(2, dtype=torch.int32)
        column = (along_row <= (rank - before)[:, :, None]).sum(2)
        none = (self.count == 0)[:, None]
        return column.masked_fill(none, 0), row.masked_fill(none, 0)


def place_windows(highlighted: PixelPicker, draws: tuple[Tensor, ...], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Left and top, each (B, K), of windows centred on a highlighted pixel and pushed into the film.

    A film without highlight (blank, one value) gets its windows anywhere.
    """
    window_width, window_height = size
    height_H, width_W = highlighted.chosen_BHW.shape[1:]
    last_left, last_top = width_W - window_width, height_H - window_height
    column, row = highlighted.pick(draws[Draw.TEXTURE])
    left = (column - window_width // 2).clamp(0, last_left)
    top = (row - window_height // 2).clamp(0, last_top)
    none = (highlighted.count == 0)[:, None]
    return (
        torch.where(none, below(draws[Draw.WINDOW_X], last_left + 1), left),
        torch.where(none, below(draws[Draw.WINDOW_Y], last_top + 1), top),
    )


def lung_field(gray_BHW: Tensor) -> Tensor:
    """True inside the lungs, bool (B, H, W); see :func:`lung_depth`."""
    return lung_depth(gray_BHW) > 0


def lung_depth(gray_BHW: Tensor) -> Tensor:
    """0 outside the lung field, rising to 1 within a few pixels of its edge; float32 (B, H, W).

    The dark cells are shared between two fronts that start at the same time: one from where lungs lie in nearly every
    frontal film, one from the film's margin. Where lung and background touch (a shoulder, a collimated edge) they meet
    halfway, while a plain flood from the border would drain the lung. A film in which nothing is found keeps its
    central dark cells, and failing these all of itself, so that there is always somewhere to put a lesion.
    """
    cells = gray_BHW.to(torch.float32)
    if cells.shape[1:] != (_GRID, _GRID):
        cells = functional.adaptive_avg_pool2d(cells[:, None], _GRID)[:, 0]
    top, bottom, left, right = (round(edge * _GRID) for edge in _CENTRE)
    threshold = otsu_threshold(cells[:, top:bottom, left:right])
    dark = cells < threshold[:, None, None]
    seeds, centre, inside = _templates(gray_BHW.device)

    rows = _packed(dark)
    lungs = _unpacked(_opened(_race(rows, lungs=rows & _packed(seeds), outside=rows & ~_packed(inside))))
    lungs = torch.where(_share(lungs) < _SMALLEST_SHARE, dark & centre, lungs)

    # Averaged over the neighbours, cells get a round outline; the half of the average runs along the old edge.
    average = functional.avg_pool2d(lungs[:, None].to(torch.float32), 3, 1, 1, count_include_pad=False)
    size = (gray_BHW.shape[-2], gray_BHW.shape[-1])
    if size != (_GRID, _GRID):
        average = functional.interpolate(average, size=size, mode="bilinear", align_corners=False)
    depth = average[:, 0]
    depth = depth.mul_(2).sub_(1).clamp_(0, 1)
    return depth.masked_fill_(_share(depth > 0) < _SMALLEST_SHARE, 1)


def _templates(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Three grids (G, G): the middle of each lung, the oval of the chest, and everything but the margin."""
    at = (torch.arange(_GRID, device=device) + 0.5) / _GRID
    x, y = at[None, :], at[:, None]
    sideways = (x - 0.5).abs()
    seeds = ((sideways - 0.21) / 0.08).square() + ((y - 0.43) / 0.17).square() < 1
    centre = (sideways / 0.42).square() + ((y - 0.47) / 0.40).square() < 1
    top, bottom, left, right = _INSIDE
    return seeds, centre, (x > left) & (x < right) & (y > top) & (y < bottom)


# On packed fields a cell is a bit and a row of cells a number, int64 (..., G): the fronts advance some twenty times a
# batch, and one operation moves 56 cells.


def _packed(field: Tensor) -> Tensor:
    """Bool (..., G, G) -> int64 (..., G)."""
    return (field.to(torch.int64) << torch.arange(_GRID, device=field.device)).sum(-1)


def _unpacked(rows: Tensor) -> Tensor:
    """int64 (..., G) -> bool (..., G, G)."""
    return (rows[..., None] >> torch.arange(_GRID, device=rows.device)).bitwise_and_(1).to(torch.bool)


def _race(dark: Tensor, lungs: Tensor, outside: Tensor) -> Tensor:
    """Let both fronts advance through dark cells, a cell at a time, until neither can; returns the lungs' share. All
    are packed.

    The outside only advances through the core of the darkness, and what lies within a gap's width of it goes with it.
    """
    core = _shrunk(dark, _GAP)
    free = torch.stack([core, dark])
    # In one tensor and in place: on a CPU the number of operations counts, not their size. Rows of nothing above and
    # below are the neighbours of the first and the last.
    fronts, wide = (dark.new_zeros(2, *dark.shape[:-1], _GRID + 2) for _ in range(2))
    rows, wide_rows = fronts[..., 1:-1], wide[..., 1:-1]
    rows[0], rows[1] = outside, lungs
    outside, lungs = rows[0], rows[1]  # views from here on
    for _ in range(_GRID // 2):  # from the margin to the middle
        before = rows.clone()
        torch.bitwise_left_shift(rows, 1, out=wide_rows)  # what leaves its row is not free
        wide_rows |= rows
        wide_rows |= rows >> 1
        advanced = wide[..., :-2] | wide_rows
        advanced |= wide[..., 2:]
        advanced &= free
        outside |= advanced[0] & ~lungs
        lungs |= advanced[1] & ~outside
        if torch.equal(rows, before):
            break
    return lungs & ~_grown(outside & core, _GAP)


def _share(field: Tensor) -> Tensor:
    """Share of each film that is true, (B, 1, 1)."""
    return field.to(torch.float32).mean((1, 2), keepdim=True)


def _grown(rows: Tensor, cells: int = 1) -> Tensor:
    """Dilation of a packed field by ``cells`` in all eight directions."""
    for _ in range(cells):
        wide = ((rows << 1) & _ROW) | rows | (rows >> 1)
        rows = wide.clone()
        rows[..., 1:] |= wide[..., :-1]
        rows[..., :-1] |= wide[..., 1:]
    return rows


def _shrunk(rows: Tensor, cells: int) -> Tensor:
    return _grown(rows ^ _ROW, cells) ^ _ROW


def _opened(rows: Tensor) -> Tensor:
    """Without specks and threads narrower than three cells."""
    return _grown(_shrunk(rows, 1))


# Names of places in the chest


@dataclass(frozen=True)
class Region:
    """The most deviating place of a film: ``x`` and ``y`` in fractions of the square film, ``sd`` of its heat there."""

    words: str
    x: float
    y: float
    sd: float


@dataclass(frozen=True)
class _Lungs:
    """The lung field (S, S) of a film, with its edges in fractions of the film; nothing where none was found."""

    field: NDArray[np.bool_] | None
    top: float = 0.0
    bottom: float = 1.0
    inner: tuple[float, float] = (0.42, 0.58)  # between these lies the mediastinum
    outer: tuple[float, float] = (0.0, 1.0)


def regions(films_BSS: NDArray[np.float32], heat_BRC: NDArray[np.float32]) -> list[Region]:
    """The most deviating region of each film."""
    small = functional.adaptive_avg_pool2d(torch.from_numpy(np.ascontiguousarray(films_BSS))[:, None], _FIELD_SIDE)[
        :, 0
    ]
    fields = lung_field(small).numpy()
    return [_region(lungs, heat) for lungs, heat in zip(_lungs(fields), heat_BRC, strict=True)]


def region_message(region: Region, low: float) -> str:
    """``right lower zone, 4.2 sd above normal films there``; below ``low``, the foot of the scale, nothing does."""
    if region.sd < low:
        return f"nothing stands out (highest: {region.words}, {region.sd:.1f} sd)"
    return f"{region.words}, {region.sd:.1f} sd above normal films there"


def _region(lungs: _Lungs, heat_RC: NDArray[np.float32]) -> Region:
    """The hottest cell within the chest: what is hot on a border, a shutter or a marker is no finding, and one that
    reaches beyond the chest is hot inside too."""
    rows, columns = heat_RC.shape
    chest = np.where(_within_chest(lungs, rows, columns), heat_RC, -np.inf)
    hottest = chest if chest.max() > 0 else heat_RC  # nothing in the chest stands out at all
    row, column = divmod(int(hottest.argmax()), columns)
    x, y = (column + 0.5) / columns, (row + 0.5) / rows
    return Region(_words(lungs, x, y, 1 / columns, 1 / rows), x, y, float(heat_RC[row, column]))


def _within_chest(lungs: _Lungs, rows: int, columns: int) -> NDArray[np.bool_]:
    """(R, C): cells around the lungs; without lungs to go by, all but the outermost."""
    y, x = (np.arange(rows) + 0.5) / rows, (np.arange(columns) + 0.5) / columns
    left, right, top, bottom = (_RIM, 1 - _RIM) * 2 if min(rows, columns) > 2 else (0.0, 1.0) * 2
    if lungs.field is not None:
        left, right = max(left, lungs.outer[0] - _RIM), min(right, lungs.outer[1] + _RIM)
        top, bottom = max(top, lungs.top - _RIM), min(bottom, lungs.bottom + _BELOW)
    inside: NDArray[np.bool_] = ((y > top) & (y < bottom))[:, None] & ((x > left) & (x < right))
    return inside if inside.any() else np.ones((rows, columns), bool)


def _words(lungs: _Lungs, x: float, y: float, width: float, height: float) -> str:
    """The place (x, y), the centre of a cell of the given width and height."""
    left, right = lungs.inner
    side = "right" if x < (left + right) / 2 else "left"
    if lungs.field is None:
        return "central" if left <= x <= right else f"{side} {_zone(lungs, y)} zone of the film"
    if _lung_share(lungs.field, x, y, width, height) >= _IN_LUNG:
        return f"{side} {_zone(lungs, y)} zone"
    if y < lungs.top:
        return f"above the lungs, {side}"
    if y > lungs.bottom:
        return f"below the lungs, {side}"
    if left <= x <= right:
        return f"central (mediastinum), {_zone(lungs, y)} third"
    if lungs.outer[0] <= x <= lungs.outer[1]:  # heart, diaphragm, or a lung too bright to be seen as one
        return f"{side} {_zone(lungs, y)} zone, dense part"
    return f"outside the lungs, {side}"


def _zone(lungs: _Lungs, y: float) -> str:
    third = int(3 * (y - lungs.top) / max(lungs.bottom - lungs.top, 1e-6))
    return _ZONES[min(max(third, 0), 2)]


def _lung_share(field: NDArray[np.bool_], x: float, y: float, width: float, height: float) -> float:
    rows, columns = field.shape
    cell = field[
        round((y - height / 2) * rows) : round((y + height / 2) * rows),
        round((x - width / 2) * columns) : round((x + width / 2) * columns),
    ]
    return float(cell.mean()) if cell.size else 0.0


def _lungs(fields_BSS: NDArray[np.bool_]) -> Iterator[_Lungs]:
    """Edges of the two lungs of each film; no field where either side of the film has too little of one."""
    _, height, width = fields_BSS.shape
    across_BS, down_BS = fields_BSS.sum(axis=2), fields_BSS.sum(axis=1)  # of all films at once
    for lungs, across, down in zip(fields_BSS, across_BS, down_BS, strict=True):
        halves = down[: width // 2], down[width // 2 :]
        rows = np.flatnonzero(across > 0.02 * width)
        columns = [np.flatnonzero(half > 0.1 * len(rows)) for half in halves]
        whole = across.sum() > _WHOLE_FILM * lungs.size
        small = min(half.sum() for half in halves) < _SMALLEST_LUNG * lungs.size
        if whole or small or not (len(rows) and len(columns[0]) and len(columns[1])):
            yield _Lungs(None)
            continue
        inner = (float(columns[0][-1] + 1) / width, float(columns[1][0] + width // 2) / width)
        outer = (float(columns[0][0]) / width, float(columns[1][-1] + 1 + width // 2) / width)
        yield _Lungs(lungs, float(rows[0]) / height, float(rows[-1] + 1) / height, inner, outer)
