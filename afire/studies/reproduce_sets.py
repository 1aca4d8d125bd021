"""What can be reproduced: the paper's targets and published numbers, datasets to run them on, and how much is run.

Published numbers and the paper's protocol come from ``presets/published.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from afire.errors import UserError


@dataclass(frozen=True)
class Scale:
    """Preset, seeds, labelling ratios and folds of all steps, and ``settings`` (key.sub=value) of each command.

    Those of ``pretrain`` hold for ablations as well.
    """

    name: str
    preset: str
    seeds: tuple[int, ...]
    fractions: tuple[float, ...]
    folds: int
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quick_recipe: bool = False  # the recipe `quick` instead of the paper's for its set
    films: int = 0  # of the phantom
    drawn_size: int = 0

    def changed(
        self,
        preset: str | None = None,
        settings: Mapping[str, Sequence[str]] = MappingProxyType({}),
        seeds: Sequence[int] | None = None,
        fractions: Sequence[float] | None = None,
        folds: int | None = None,
        films: int | None = None,
    ) -> Scale:
        """The same with what a user asked for; ``settings`` by the command that they are for."""
        # Settings of ours were made for our preset; with another one they would mean something else.
        ours = {**self.settings, **({} if preset in (None, self.preset) else {"pretrain": ()})}
        return replace(
            self,
            preset=preset or self.preset,
            seeds=tuple(seeds) if seeds is not None else self.seeds,
            fractions=tuple(fractions) if fractions is not None else self.fractions,
            folds=self.folds if folds is None else folds,
            films=self.films if films is None else films,
            settings={name: (*ours.get(name, ()), *settings.get(name, ())) for name in {**ours, **settings}},
        )

    def set_arguments(self, *commands: str) -> tuple[str, ...]:
        """``--set`` arguments of these commands together; of two values of one setting only the later one counts."""
        texts = [text for command in commands for text in self.settings.get(command, ())]
        latest = {text.partition("=")[0].strip(): text for text in texts}
        return tuple(argument for text in latest.values() for argument in ("--set", text))


PAPER = Scale("paper", "paper", (0, 1, 2), (1, 10, 100), 5)
QUICK = Scale(
    "quick",
    "small",
    (0, 1),
    (1, 10, 100),
    0,
    settings={
        "pretrain": ("training.epochs=10",),
        "ablate": ("training.epochs=5",),
        "finetune": ("training.epochs=3",),
        "segment": ("training.epochs=10",),
        "detect": ("adapt.epochs=5",),
    },
    quick_recipe=True,
)
PHANTOM = Scale(
    "phantom",
    "tiny",
    (0, 1),
    (10, 100),
    2,
    settings={
        "pretrain": ("image.size=128", "training.epochs=20", "run.picture_epochs=20"),
        "ablate": ("training.epochs=8",),
        "finetune": ("training.epochs=6",),
        "segment": ("training.epochs=6", "training.learning_rate=1e-3", "training.batch_size=32"),
        "detect": ("adapt.epochs=4",),
    },
    films=800,
    drawn_size=160,
)


def scale_for(on: str, quick: bool) -> Scale:
    """The scale that a set starts from."""
    if on == "phantom":
        if quick:
            raise UserError("--quick is for real films; the phantom is quick as it is.")
        return PHANTOM
    return QUICK if quick else PAPER


Target = Literal["table1", "table2", "table3", "table4", "fig-tsne", "fig-cam", "fig-restore"]
TITLES: dict[Target, str] = {
    "table1": "Table 1: what each component is worth",
    "table2": "Table 2: transfer with different labelling ratios",
    "table3": "Table 3: anomaly detection",
    "table4": "Table 4: what other components are worth",
    "fig-tsne": "Figure: t-SNE of films and of places",
    "fig-cam": "Figure: Grad-CAM beside lesion boxes",
    "fig-restore": "Figures: restorations with and without z_mask",
}
TARGETS: tuple[Target, ...] = tuple(TITLES)


@dataclass(frozen=True)
class Dataset:
    """One set. ``classify`` and ``segment`` are the arguments of its fine-tuning, if it has labels or masks for one.

    ``published`` names the columns of the paper's tables that stand beside it; for a set that the paper does not use,
    those nearest in kind.
    """

    name: str
    title: str
    download: str
    classify: tuple[str, ...] = ()
    segment: tuple[str, ...] = ()
    detect: tuple[str, ...] = ()  # arguments of both the fit and the evaluation
    boxes: bool = False
    normals: bool = True  # films known to be normal and films known not to be
    published: tuple[tuple[str, str], ...] = ()  # (table2, segment or table3; column of the paper)

    def column(self, kind: str) -> str | None:
        """The paper's column beside ``kind``, or None."""
        return dict(self.published).get(kind)

    def missing(self, target: Target) -> str:
        """Why a target cannot be run on this set, or nothing."""
        if target in ("table1", "table4", "table3") and not self.normals:
            return f"{self.title} does not say which films are normal beyond its one finding"
        if target == "table2" and not (self.classify or self.segment):
            return f"{self.title} has neither findings nor masks to learn"
        if target == "fig-cam" and not (self.boxes and self.classify):
            return f"{self.title} has no lesion boxes"
        return ""


DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "phantom",
            "the phantom",
            "",
            classify=("--recipe", "quick"),
            segment=("--set", "masks.normal_is_empty=true"),
            boxes=True,
            published=(("classify", "nih"), ("segment", "siim"), ("table3", "childcxr")),
        ),
        Dataset(
            "childcxr",
            "ChildCXR",
            "ChestXRay2017.zip from https://data.mendeley.com/datasets/rscbjbr9sj (CC BY 4.0) and unpack it",
            classify=("--labels", "abnormal"),
            published=(("table3", "childcxr"),),
        ),
        Dataset(
            "nih",
            "NIH ChestX-ray14",
            "images_001.tar.gz to images_012.tar.gz, Data_Entry_2017_v2020.csv, BBox_List_2017.csv and the two lists "
            "from https://nihcc.app.box.com/v/ChestXray-NIHCC and unpack them",
            classify=("--recipe", "nih14"),
            boxes=True,
            published=(("classify", "nih"), ("table3", "nih")),
        ),
        Dataset(
            "chexpert",
            "CheXpert",
            "CheXpert-v1.0-small from https://stanfordmlgroup.github.io/competitions/chexpert (after registering)",
            classify=("--recipe", "chexpert5"),
            detect=("--protocol", "chexpert250"),
            published=(("classify", "chexpert"), ("table3", "chexpert")),
        ),
        Dataset(
            "siim",
            "SIIM-ACR",
            "the films and train-rle.csv of https://www.kaggle.com/c/siim-acr-pneumothorax-segmentation",
            segment=("--recipe", "siim"),
            normals=False,
            published=(("segment", "siim"),),
        ),
        Dataset(
            "shenzhen",
            "Shenzhen",
            "the films and lung masks of the Shenzhen set of the U.S. National Library of Medicine",
            classify=("--labels", "abnormal"),
            segment=("--recipe", "lungs"),
        ),
    )
}


PUBLISHED = Path(__file__).parents[1] / "presets" / "published.yaml"
OURS = "AFiRe"  # the paper's own row


@dataclass(frozen=True)
class Column:
    """One dataset's columns of a table: rows of methods, numbers as shares of 1 by their column's name."""

    source: str
    title: str
    rows: Mapping[str, Mapping[str, float]]


@cache
def published() -> Mapping[str, Any]:
    """The whole file."""
    content: Mapping[str, Any] = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    return content


def column(table: str, name: str | None) -> Column | None:
    """The columns of ``table`` about the dataset ``name``; None where the paper has none."""
    if name is None:
        return None
    raw = published()[table]
    block = raw[name]
    rows = {
        method: {str(key): value / 100 for key, value in numbers.items()} for method, numbers in block["rows"].items()
    }
    return Column(str(raw["source"]), str(block["title"]), rows)


def protocol() -> Mapping[str, Any]:
    """How the paper's numbers were made."""
    content: Mapping[str, Any] = published()["protocol"]
    return content
