"""Pictures about detectors: ROC and scores of an evaluation; of each film of a run its heat, the restored film and the
difference.

One scale serves all films of all runs of a detector: a colour means the same everywhere, and a film on which nothing
stands out shows no colour. Colours can be told apart by colour-blind readers.

Shapes: H x W pixels of a film as it is shown, S x S of what the networks saw, R x C cells of heat.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional

from afire.data.decode import FitMode
from afire.data.manifest import ABNORMAL
from afire.detect.base import HeatScale
from afire.detect.evaluate import ROW, Evaluated
from afire.detect.run import Drawing, Drawn
from afire.files import names_path
from afire.report.style import COLOURS, FAINT, INK, save_figure, style
from afire.report.task_figures import roc_curves
from afire.tasks.metrics import interval, patient_draws
from afire.tasks.results import SCORE, TRUTH

FloatArray = NDArray[np.float64]
_GRID = np.linspace(0, 1, 101)
_BAND_DRAWS, _MOST_BINS = 300, 40
_TRIVIAL_COLOURS = (*COLOURS[1:], "#7F7F7F")  # one for each trivial row
_DASHES = ((0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)))


def write_detection_figures(out: Path, evaluated: Evaluated) -> list[Path]:
    """``roc`` and ``scores``, as PNG and PDF."""
    with style():
        return [
            *save_figure(roc_figure(evaluated), out / "roc"),
            *save_figure(score_figure(evaluated), out / "scores"),
        ]


def roc_figure(evaluated: Evaluated) -> Figure:
    """The chosen score with its 95 % band over patients, and the trivial detectors beside it; means over detectors."""
    figure: Figure = plt.figure(figsize=(7.2, 3.9))
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8)
    low, high = _band(evaluated.predictions)
    axis.fill_between(_GRID, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
    trivial = sorted(
        (line for line in evaluated.lines if line.kind == "trivial"), key=lambda line: -line.metrics["auc"].mean
    )
    for number, line in enumerate(trivial):
        colour = _TRIVIAL_COLOURS[number % len(_TRIVIAL_COLOURS)]
        curve = _mean_curve(evaluated.predictions, ROW + line.name)
        label = f"{line.name} {line.metrics['auc'].mean:.3f}"
        axis.plot(_GRID, curve, color=colour, linewidth=1.0, linestyle=_DASHES[number % len(_DASHES)], label=label)
    best = evaluated.lines[0]
    curve = _mean_curve(evaluated.predictions, SCORE + ABNORMAL)
    label = f"{_short(best.meaning)} {best.metrics['auc'].mean:.3f}"
    axis.plot(np.r_[0, _GRID], np.r_[0, curve], color=COLOURS[0], linewidth=1.8, label=label)
    axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axis.set(xlabel="normal films that are flagged", ylabel="abnormal films that are flagged")
    handles, labels = axis.get_legend_handles_labels()
    order = [len(handles) - 1, *range(len(handles) - 1)]
    figure.legend(
        [handles[place] for place in order], [labels[place] for place in order], loc="outside right center", title="AUC"
    )
    return figure


def score_figure(evaluated: Evaluated) -> Figure:
    """Where normal and abnormal test films score, one panel a detector, with the calibrated threshold."""
    runs = list(evaluated.predictions["run"].unique())
    figure: Figure = plt.figure(figsize=(5.6, 0.9 + 1.7 * len(runs)))
    axes = np.atleast_1d(figure.subplots(len(runs), 1))
    for axis, run, threshold in zip(axes, runs, evaluated.thresholds, strict=True):
        frame = evaluated.predictions[evaluated.predictions["run"] == run]
        scores, truth = frame[SCORE + ABNORMAL].to_numpy(np.float64), frame[TRUTH + ABNORMAL].to_numpy(np.float64)
        ends = [*np.percentile(scores, [0.2, 99.8]), *([threshold] if np.isfinite(threshold) else [])]
        edges = np.linspace(min(ends), max(ends), int(np.clip(len(scores) // 8, 8, _MOST_BINS)) + 1)
        clipped = np.clip(scores, edges[0], edges[-1])  # the few far ones pile up at the ends
        for value, word, colour in ((0, "normal", COLOURS[0]), (1, "abnormal", COLOURS[1])):
            subset = clipped[truth == value]
            weights = np.full(len(subset), 100 / max(len(subset), 1))
            label = f"{word} ({len(subset):,})"
            axis.hist(subset, edges, weights=weights, color=colour, alpha=0.30, linewidth=0)
            axis.hist(subset, edges, weights=weights, color=colour, histtype="step", linewidth=1.2, label=label)
        if np.isfinite(threshold):
            caught = [100 * float((scores[truth == value] >= threshold).mean()) for value in (0, 1)]
            axis.axvline(threshold, color=INK, linewidth=1)
            text = f"  {caught[0]:.0f} % of normal and\n  {caught[1]:.0f} % of abnormal flagged"
            axis.text(threshold, 0.98, text, transform=axis.get_xaxis_transform(), fontsize=8, va="top")
        axis.set_ylabel("% of films")
        axis.set_title(run if len(runs) > 1 else "")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    axes[-1].set_xlabel(f"{_short(evaluated.lines[0].meaning)}, larger = more abnormal")
    return figure


def _mean_curve(predictions: pd.DataFrame, column: str) -> FloatArray:
    curves = [
        roc_curves(
            frame[column].to_numpy(np.float64), frame[TRUTH + ABNORMAL].to_numpy(np.float64), np.ones((1, len(frame)))
        )[0]
        for _, frame in predictions.groupby("run", sort=False)
    ]
    mean: FloatArray = np.mean(curves, axis=0)
    return mean


def _band(predictions: pd.DataFrame) -> tuple[FloatArray, FloatArray]:
    """95 % of the chosen score's curve over draws of patients, the same draw for every detector."""
    frames = [frame for _, frame in predictions.groupby("run", sort=False)]
    patients = frames[0]["patient"].to_numpy(dtype=object)
    means = []
    for weights in patient_draws(patients, np.random.default_rng(0), _BAND_DRAWS):
        curves = [
            roc_curves(
                frame[SCORE + ABNORMAL].to_numpy(np.float64), frame[TRUTH + ABNORMAL].to_numpy(np.float64), weights
            )
            for frame in frames
        ]
        means.append(np.mean(curves, axis=0))
    limits = np.array([interval(column) for column in np.concatenate(means).T])
    return limits[:, 0], limits[:, 1]


def _short(names: str) -> str:
    return names if len(names) <= 34 else "chosen score"


FOLDER, LEGEND = "pictures", "legend.png"
DIFFERENCE_TOP = 0.4  # of the range from black to white: full colour
KINDS = {"film": "jpg", "heat": "png", "overlay": "jpg", "restored": "jpg", "difference": "jpg"}  # and their formats
PER_FOLDER = 1000  # films
_FORMATS = {"jpg": "JPEG", "png": "PNG"}
_LEVELS = 256
_FEW_CELLS = 1024
_OPACITY = 0.8  # of the heat at the top of the scale
_LEGEND_GREY = 90
_HEAT_SIDE = 128  # longest side of the transparent heat: it is smooth, and the page enlarges it
_OVERLAY_SIDE = 256  # from twice this side on, an overlay is drawn smaller by a whole factor: the film itself is there
WARNING = "AFIRE HEATMAP - RESEARCH SOFTWARE, NOT A MEDICAL DEVICE"

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Painter:
    """Draws films for :func:`afire.detect.run.run_detector`; several threads may call it at once.

    ``out`` is the results' folder.
    """

    out: Path
    scale: HeatScale
    fit: FitMode

    def __call__(self, drawing: Drawing) -> Drawn:
        film = drawing.film
        assert film.shown is not None
        shape = film.shown.shape[0], film.shown.shape[1]
        film_bytes = film.jpeg or _encoded(Image.fromarray(film.shown), "film")
        pictures = {"film": film_bytes}
        if drawing.heat is not None:
            levels = heat_levels(drawing.heat, shape, self.scale, self.fit)
            small = _reduced(film.shown)
            if levels.getbbox() is not None:
                # Once more at the overlay's size: finer than steps that are enlarged, and faster.
                steps = heat_levels(drawing.heat, small.shape, self.scale, self.fit, max(small.shape))
                pictures["overlay"] = _encoded(laid_over(small, steps), "overlay")
            else:
                pictures["overlay"] = film_bytes if small is film.shown else _encoded(Image.fromarray(small), "overlay")
            pictures["heat"] = _encoded(transparent(levels), "heat")
        if drawing.restored is not None:
            restored = _grey(to_film(drawing.restored, _small(shape, drawing.restored), self.fit))
            difference = self._difference(film.square, drawing.restored, shape)
            pictures |= {
                "restored": _encoded(restored, "restored"),
                "difference": _encoded(difference, "difference"),
            }
        return Drawn(self._written(film.number, pictures))

    def _written(self, number: int, pictures: dict[str, bytes]) -> dict[str, str]:
        """Not synced: the journal names a film only after this, and a film it does not name is drawn again."""
        names = {kind: picture_name(number, kind) for kind in pictures}
        folder = (self.out / names["film"]).parent
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
        for kind, picture in pictures.items():
            path = self.out / names[kind]
            with names_path(path):
                path.write_bytes(picture)
        return names

    def _difference(self, square: Floats, restored: Floats, shape: tuple[int, int]) -> Image.Image:
        difference = to_film(square - restored, _small(shape, restored), self.fit)
        half = (_LEVELS - 1) / 2
        levels = _whole_levels(difference * (half / DIFFERENCE_TOP) + half)
        height, width = levels.shape
        return Image.frombytes("RGB", (width, height), _difference_pixels().take(levels), "raw", "RGBX")


def heat_levels(
    heat: Floats, shape: tuple[int, ...], scale: HeatScale, fit: FitMode, longest: int = _HEAT_SIDE
) -> Image.Image:
    """Heat (R, C) in sd -> steps of the scale, 0 = below it, in the proportions (H, W) of the film but small."""
    shrink = min(1.0, longest / max(shape))
    small = max(1, round(shape[0] * shrink)), max(1, round(shape[1] * shrink))
    # Before it is spread: there are fewer cells than pixels.
    steps = (heat - np.float32(scale.low)) * np.float32((_LEVELS - 1) / (scale.high - scale.low))
    return Image.fromarray(_whole_levels(to_film(steps, small, fit)))


def _whole_levels(levels: Floats) -> Bytes:
    """Rounded, and kept to the table of colours."""
    clipped = np.clip(levels, 0, _LEVELS - 1)
    rounded: Bytes = np.rint(clipped, out=clipped).astype(np.uint8)
    return rounded


def _encoded(image: Image.Image, kind: str) -> bytes:
    """The bytes of a picture's file. Of PNG the strategy for runs: smooth heat gets as small by it, in less time."""
    file = io.BytesIO()
    image.save(file, _FORMATS[KINDS[kind]], quality=90, compress_level=1, compress_type=3)  # each takes its own
    return file.getvalue()


def picture_name(number: int, kind: str) -> str:
    """The file of a picture, relative to the results' folder; the page knows this pattern too."""
    return f"{FOLDER}/{number // PER_FOLDER:03d}/{number:06d}-{kind}.{KINDS[kind]}"


def to_film(square: Floats, shape: tuple[int, int], fit: FitMode, outside: float = 0.0) -> Floats:
    """What lies on the square film, (R, C) of any resolution, in the proportions (H, W) of the film itself.

    Undoes ``fit_square``: what letterbox added is cut off; ``outside`` fills what crop cut off.
    """
    height, width = shape
    if fit == "crop":
        side = min(shape)
        top, left = (height - side) // 2, (width - side) // 2
        spread = np.full(shape, outside, np.float32)
        spread[top : top + side, left : left + side] = _stretched(square, (side, side))
        return spread
    across, down = (width / max(shape), height / max(shape)) if fit == "letterbox" else (1.0, 1.0)
    return _stretched(square, shape, across, down)


def _stretched(square: Floats, shape: tuple[int, int], across: float = 1.0, down: float = 1.0) -> Floats:
    """The middle of a square (R, C), so much of its width and height, at (H, W) pixels; bicubic."""
    rows, columns = square.shape
    if shape == square.shape and across == down == 1:
        return square
    if square.size > _FEW_CELLS:
        image = Image.fromarray(np.ascontiguousarray(square, np.float32))
        box = (columns * (1 - across) / 2, rows * (1 - down) / 2, columns * (1 + across) / 2, rows * (1 + down) / 2)
        return np.asarray(image.resize((shape[1], shape[0]), Image.Resampling.BICUBIC, box))
    # Of few cells two products of matrices take a quarter of the time. By torch, which runs one thread for each batch.
    cells = torch.from_numpy(np.ascontiguousarray(square, np.float32))
    stretched: Floats = (_weights(rows, shape[0], down) @ cells @ _weights(columns, shape[1], across).T).numpy()
    return stretched


@lru_cache(maxsize=64)
def _weights(cells: int, pixels: int, share: float) -> torch.Tensor:
    """(pixels, cells): how much of each cell is in each pixel, as pillow has it, for the middle ``share`` of them."""
    one_each = Image.fromarray(np.eye(cells, dtype=np.float32))
    box = (0, cells * (1 - share) / 2, cells, cells * (1 + share) / 2)
    return torch.from_numpy(np.array(one_each.resize((cells, pixels), Image.Resampling.BICUBIC, box)))


def transparent(levels: Image.Image) -> Image.Image:
    """Steps of the scale as a picture to be laid over the film."""
    image = levels.copy()
    image.putpalette(heat_colours().tobytes())
    image.info["transparency"] = _opacity().tobytes()
    return image


def laid_over(film: Bytes, levels: Image.Image) -> Image.Image:
    """A grey film (H, W) under steps of the scale, in colour.

    What a grey value becomes under a step is looked up: a third of the time of mixing pixel by pixel.
    """
    if levels.getbbox() is None:
        grey = Image.fromarray(film)
        return Image.merge("RGB", (grey, grey, grey))  # faster than to convert it
    height, width = film.shape
    steps = np.asarray(levels)
    if steps.shape != film.shape:
        small = torch.from_numpy(np.array(levels))[None, None]
        size = (height, width)
        steps = functional.interpolate(small, size=size, mode="bilinear", antialias=True)[0, 0].numpy()  # as pillow
    at = steps.astype(np.uint16) * np.uint16(_LEVELS)
    at += film
    mixed = _under_heat().take(at, mode="wrap")  # no index is checked: the table is as long as 16 bits reach
    return Image.frombytes("RGB", (width, height), mixed, "raw", "RGBX")


@lru_cache(maxsize=1)
def heat_colours() -> Bytes:
    """(256, 3): purple, orange, yellow, lighter all the way, so that they differ in grey too."""
    import matplotlib

    table = matplotlib.colormaps["inferno"](np.linspace(0.32, 1.0, _LEVELS))[:, :3]
    colours: Bytes = np.rint(table * 255).astype(np.uint8)
    return colours


@lru_cache(maxsize=1)
def difference_colours() -> Bytes:
    """(256, 3): blue where the film is darker than restored, black where it is equal, orange where it is brighter."""
    ends = np.array([[102, 178, 255], [16, 18, 22], [255, 163, 46]], np.float32)
    at = np.linspace(0, 2, _LEVELS)
    mixed = np.stack([np.interp(at, [0, 1, 2], ends[:, channel]) for channel in range(3)], axis=1)
    return np.rint(mixed).astype(np.uint8)


@lru_cache(maxsize=1)
def _difference_pixels() -> NDArray[np.uint32]:
    """(256,): the same, red, green, blue and nothing, a byte each."""
    pixels = np.zeros((_LEVELS, 4), np.uint8)
    pixels[:, :3] = difference_colours()
    return pixels.view(np.uint32).ravel()


@lru_cache(maxsize=1)
def _opacity() -> Bytes:
    """(256,): nothing below the scale, then soon enough to see a weak finding."""
    opacity: Bytes = np.rint(255 * _OPACITY * np.linspace(0, 1, _LEVELS) ** 0.5).astype(np.uint8)
    return opacity


@lru_cache(maxsize=1)
def _under_heat() -> NDArray[np.uint32]:
    """(256 * 256,): red, green, blue and nothing, a byte each, of every grey value under every step of the scale."""
    greys, opacity = np.arange(_LEVELS, dtype=np.uint32)[None, :, None], _opacity().astype(np.uint32)[:, None, None]
    mixed = heat_colours().astype(np.uint32)[:, None] * opacity + greys * (255 - opacity)
    pixels = np.zeros((_LEVELS, _LEVELS, 4), np.uint8)
    pixels[..., :3] = (mixed + 127) // 255
    return pixels.view(np.uint32).ravel()


def heat_legend(scale: HeatScale, width: int = 640) -> Image.Image:
    """The warning, and a bar of the colours with their meaning."""
    size = max(13, width // 44)
    font = ImageFont.load_default(size)
    image = Image.new("RGB", (width, 6 * size), (10, 11, 13))
    draw = ImageDraw.Draw(image)
    draw.text((width / 2, 0.5 * size), WARNING, (255, 255, 255), font=font, anchor="ma")
    left, right, top, bottom = 2 * size, width - 2 * size, round(2.3 * size), round(3.2 * size)
    bar = Image.fromarray(heat_on_grey()[None]).resize((right - left, bottom - top), Image.Resampling.BILINEAR)
    image.paste(bar, (left, top))
    for share in (0.0, 0.5, 1.0):
        value = scale.low + share * (scale.high - scale.low)
        text = f"{value:.1f}" + (" sd and more" if share == 1 else "")
        anchor = ("la", "ma", "ra")[round(2 * share)]
        draw.text((left + share * (right - left), bottom + 0.3 * size), text, (220, 222, 226), font=font, anchor=anchor)
    draw.text((width / 2, 4.7 * size), "deviation from normal films", (160, 164, 170), font=font, anchor="ma")
    return image


def heat_on_grey() -> Bytes:
    """(256, 3): the colours of the scale as they look on a grey film."""
    opacity = _opacity()[:, None] / 255
    colours: Bytes = np.rint(_LEGEND_GREY * (1 - opacity) + heat_colours() * opacity).astype(np.uint8)
    return colours


def css_gradient(colours: Bytes) -> str:
    """A CSS gradient of a colour table, left to right."""
    stops = ", ".join("rgb({}, {}, {})".format(*colours[index]) for index in np.linspace(0, _LEVELS - 1, 9).astype(int))
    return f"linear-gradient(to right, {stops})"


def _reduced(film: Bytes) -> Bytes:
    factor = max(1, max(film.shape) // _OVERLAY_SIDE)
    return film if factor == 1 else np.asarray(Image.fromarray(film).reduce(factor))


def _small(shape: tuple[int, int], square: Floats) -> tuple[int, int]:
    """The film's proportions at the resolution of the networks: more pixels would show nothing more."""
    scale = square.shape[0] / max(shape[0], shape[1])
    return max(1, round(shape[0] * scale)), max(1, round(shape[1] * scale))


def _grey(film: Floats) -> Image.Image:
    return Image.fromarray(_whole_levels(film * np.float32(_LEVELS - 1)))
