"""The one picture of the architecture page: ``python scripts/architecture.py`` writes docs/images/architecture.png."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from PIL import Image

TARGET = Path(__file__).parent.parent / "docs" / "images" / "architecture.png"
INK, SOFT, PAPER = "#1b1f24", "#57606a", "#ffffff"
DATA, LEARN, USE, LOSS = "#dbe9f6", "#fbe3d6", "#dff0df", "#f3d9e4"


def box(axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, colour: str) -> None:
    shape = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=colour, ec=INK, lw=0.8, zorder=2))
    middle = x + width / 2
    lines = 1 + text.count("\n") if text else 0
    top = y + height / 2 + (0.05 + 0.075 * lines if lines else 0)
    axes.text(middle, top, title, ha="center", va="center", fontsize=9.5, weight="bold", color=INK, zorder=3)
    if text:
        axes.text(middle, top - 0.2, text, ha="center", va="top", fontsize=7.8, color=INK, linespacing=1.3, zorder=3)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str = "",
    bend: str = "arc3",
    side: float = 0.13,
) -> None:
    style = {"arrowstyle": "-|>", "color": SOFT, "lw": 1.1, "shrinkA": 0, "shrinkB": 0, "connectionstyle": bend}
    axes.annotate("", end, start, arrowprops=style, zorder=1)
    if label:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(x, y + side, label, ha="center", va="center", fontsize=7.5, color=SOFT, style="italic", zorder=4)


def note(axes: Axes, x: float, y: float, label: str) -> None:
    axes.text(x, y, label, fontsize=7.5, color=SOFT, style="italic", va="center")


def band(axes: Axes, x: float, width: float, title: str, rooms: str, colour: str) -> None:
    shape = "round,pad=0,rounding_size=0.2"
    axes.add_patch(FancyBboxPatch((x, 0.1), width, 7.35, boxstyle=shape, fc=colour, ec="none", alpha=0.32, zorder=0))
    axes.text(x + 0.2, 7.18, title, fontsize=11, weight="bold", color=INK, va="center")
    axes.text(x + width / 2, 0.32, rooms, fontsize=8, color=SOFT, va="center", ha="center", family="monospace")


def data(axes: Axes) -> None:
    band(axes, 0.1, 2.9, "Data", "data", DATA)
    rows = [
        (5.85, "Films", "PNG, JPEG, TIFF, DICOM"),
        (4.6, "Manifest", "afire data build\nfilm, patient, labels, view"),
        (3.35, "Audit", "afire data check\nleaks, copies, shortcuts"),
        (2.1, "Split", "afire data split\nby patient, with a hash"),
        (0.85, "Pack", "afire data pack\none memory-mapped array"),
    ]
    for y, title, text in rows:
        box(axes, 0.4, y, 2.3, 0.92, title, text, DATA)
    for (above, *_), (below, *_) in pairwise(rows):
        arrow(axes, (1.55, above), (1.55, below + 0.92))


def learning(axes: Axes) -> None:
    band(axes, 3.25, 6.9, "Pre-training, one step of the method AFiRe", "lesions -> nn -> methods -> training", LEARN)
    box(axes, 3.5, 5.75, 1.5, 0.95, "x", "normal film\nof the training set", PAPER)
    box(axes, 3.5, 2.55, 1.5, 0.95, "x', M", "lesions drawn on it\nand their mask", PAPER)
    box(axes, 5.5, 5.75, 1.6, 0.95, "Teacher", "EMA of the student\nencoder and head", LEARN)
    box(axes, 5.5, 2.55, 1.6, 0.95, "Student", "ViT encoder\nand head", LEARN)
    box(axes, 7.75, 5.75, 2.15, 0.95, "Prototypes C", "Sinkhorn, then a slow mean\nfor each position: L x K", LEARN)
    box(
        axes,
        7.75,
        3.55,
        2.15,
        1.25,
        "Token losses",
        "structure: own place\ncategory: normal together,\nabnormal away",
        LOSS,
    )
    box(axes, 5.5, 0.75, 1.6, 0.95, "Decoder", "abnormal tokens\nreplaced by z_mask", LEARN)
    box(axes, 7.75, 0.75, 2.15, 0.95, "Restoration loss", "the film as it was,\nabnormal tokens weigh more", LOSS)
    axes.plot([2.7, 3.12, 3.12], [1.31, 1.31, 6.22], color=SOFT, lw=1.1, zorder=1, solid_joinstyle="round")
    arrow(axes, (3.11, 6.22), (3.5, 6.22))
    arrow(axes, (4.25, 5.75), (4.25, 3.5))
    note(axes, 4.33, 4.62, "views():\nlesions by seed,\nepoch, film")
    arrow(axes, (5.0, 6.22), (5.5, 6.22))
    arrow(axes, (5.0, 3.02), (5.5, 3.02))
    arrow(axes, (7.1, 6.22), (7.75, 6.22), "$q^T$")
    arrow(axes, (8.82, 5.75), (8.82, 4.8))
    note(axes, 8.9, 5.28, "targets")
    arrow(axes, (7.1, 3.1), (7.75, 3.95), "$q^S$", side=0.17)
    arrow(axes, (6.3, 2.55), (6.3, 1.7))
    note(axes, 6.38, 2.12, "tokens")
    arrow(axes, (7.1, 1.22), (7.75, 1.22), "y")
    arrow(axes, (6.3, 3.5), (6.3, 5.75))
    note(axes, 6.38, 4.62, "after_step():\nEMA")
    axes.text(
        8.82,
        2.55,
        "losses().total\n.backward(), AdamW",
        fontsize=8,
        color=INK,
        ha="center",
        va="center",
        family="monospace",
    )


def use(axes: Axes) -> None:
    band(axes, 10.4, 3.5, "Use and evidence", "weights -> tasks -> detect ->\nexport -> studies -> report", USE)
    box(axes, 10.7, 5.75, 2.9, 0.95, "Weights", "run folder, bundle, hf://, ONNX\nafire export, verify, push", USE)
    rows = [
        (4.6, "embed   probe", "fixed features"),
        (3.6, "finetune   segment", "all weights"),
        (2.6, "detect", "from normal films alone"),
    ]
    for y, title, text in rows:
        box(axes, 10.7, y, 2.9, 0.78, title, text, USE)
    arrow(axes, (9.9, 6.22), (10.7, 6.22), "run folder")
    arrow(axes, (12.15, 5.75), (12.15, 5.38))
    box(
        axes,
        10.7,
        0.75,
        2.9,
        1.2,
        "Results",
        "compare, ablate, reproduce, figure\nsettings from validation films\nsplit, films and weights by hash",
        USE,
    )
    arrow(axes, (12.15, 2.6), (12.15, 1.95))


def main() -> None:
    figure = plt.figure(figsize=(11.2, 6.08), dpi=140)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 14)
    axes.set_ylim(0, 7.6)
    axes.axis("off")
    for draw in (data, learning, use):
        draw(axes)
    raw = io.BytesIO()
    figure.savefig(raw)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    Image.open(raw).convert("RGB").quantize(96).save(TARGET, optimize=True)


if __name__ == "__main__":
    main()
