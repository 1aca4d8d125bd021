"""What all figures share: the films they are drawn from, the files they become, and the table of their numbers.

``NAME.png`` for the eye, ``NAME.pdf`` for the paper, ``NAME.json`` with every number in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from afire.config import ImageConfig
from afire.data.pack import Films, open_films
from afire.data.splits import Split, films_hash
from afire.errors import UserError
from afire.files import write_json
from afire.report.style import PRINT_DPI, save_figure
from afire.report.table import DISCLAIMER, Column, Table, number, table_of
from afire.tasks.features import data_content_hash
from afire.tasks.results import Rows, plan_runs, to_json
from afire.training.run_folder import environment
from afire.weights import Weights

Subset = Literal["test", "val", "train", "all"]
FORMAT = 1
_ENDINGS = (".png", ".pdf", ".json")


@dataclass(frozen=True)
class FigureFiles:
    """The files of a figure, and what its JSON says."""

    png: Path
    pdf: Path
    json: Path
    record: Mapping[str, Any]

    @property
    def numbers(self) -> Mapping[str, Any]:
        """What was measured."""
        numbers: Mapping[str, Any] = self.record["numbers"]
        return numbers


def claim(out: Path, name: str, force: bool) -> Path:
    """The files' common path without an ending; refuses to write over a figure unless asked to.

    ``out`` is that path, with or without one of the endings, or an existing folder, in which the figure is ``name``.
    """
    without_ending = out.with_suffix("") if out.suffix.lower() in _ENDINGS else out
    stem = out / name if out.is_dir() else without_ending
    existing = [path for path in _paths(stem) if path.exists()]
    if existing and not force:
        raise UserError(f"{existing[0]} already exists; add --force to replace the figure, or choose another --out.")
    return stem


def save(stem: Path, figure: Figure, record: Mapping[str, Any]) -> FigureFiles:
    """Write the picture and then its record, whose presence says that the figure is whole."""
    png, pdf, json = _paths(stem)
    json.unlink(missing_ok=True)
    save_figure(figure, stem, PRINT_DPI)
    state = environment()
    content = to_json(
        {"format": FORMAT, **record, "command": state.pop("command"), "environment": state, "note": DISCLAIMER}
    )
    write_json(json, content)
    return FigureFiles(png, pdf, json, content)


def _paths(stem: Path) -> tuple[Path, Path, Path]:
    png, pdf, json = (stem.with_name(stem.name + ending) for ending in _ENDINGS)
    return png, pdf, json


@dataclass(frozen=True)
class Source:
    """Films of a figure: a pack, manifest or folder, the subset of it, the most films, and the seed of the draw.

    The subsets are those that the tasks use with seed 0: a split file's, else the manifest's lists, else a split drawn
    by patient. ``all`` is every film, for a set that is foreign to the weights.
    """

    data: Path
    root: Path | None = None
    split: Split | None = None
    subset: Subset = "test"
    most: int = 1000
    seed: int = 0

    def open(self, image: ImageConfig) -> Films:
        """The films as weights made for ``image`` want them."""
        return open_films(self.data, self.root, image.size, image.fit, image.voi)

    def rows(self, films: Films) -> tuple[Rows, str | None]:
        """All rows of the subset, and the hash of the split it belongs to."""
        if self.subset == "all":
            return np.arange(len(films)), None
        run = plan_runs(films.manifest, self.split, [0])[0]
        return np.asarray(run.rows[self.subset], np.int64), run.split.hash

    def draw(self, rows: Rows) -> Rows:
        """At most :attr:`most` of ``rows``, each as likely as any other, in the order of the manifest."""
        if self.most < 1:
            raise UserError(f"--films {self.most} leaves nothing to draw; give at least 1.")
        return np.sort(np.random.default_rng(self.seed).permutation(rows)[: self.most])

    def record(
        self, films: Films, rows: Rows, of: int, split_hash: str | None, subset: str | None = None
    ) -> dict[str, Any]:
        """What the figure's JSON says about its films: ``rows`` were drawn from ``of`` candidates."""
        return {
            "name": self.data.resolve().name,
            "hash": data_content_hash(films),
            "part": subset or self.subset,
            "split_hash": split_hash,
            "films": len(rows),
            "drawn_from": of,
            "films_hash": films_hash(films.manifest, {"figure": rows}),
            "size": films.size,
            "seed": self.seed,
        }


def run_record(run: Weights) -> dict[str, Any]:
    """What the figure's JSON says about a pre-training run."""
    clusters = run.config.head.clusters if "head" in run.kind.sections else None
    return {"name": run.name, "hash": run.method_hash, "report": run.method_report, "clusters": clusters}


_SUBSET_NAMES = {"all": "", "train": "training ", "val": "validation "}


def as_source(source: Source | Path, most: int = 1000) -> Source:
    """A path alone is a source with everything else by default."""
    return source if isinstance(source, Source) else Source(source, most=most)


def films_text(record: dict[str, Any], kind_of_film: str = "") -> str:
    """``300 of 624 test films of childcxr (drawn from seed 0)``."""
    subset = _SUBSET_NAMES.get(record["part"], f"{record['part']} ")
    kind = f"{kind_of_film} " if kind_of_film else ""
    of = record["drawn_from"]
    count = f"{record['films']:,}" if record["films"] == of else f"{record['films']:,} of {of:,}"
    seed = "" if record["films"] == of else f", drawn from seed {record['seed']}"
    return f"{count} {kind}{subset}films of {record['name']}{seed}"


_SHORT = {"hit": "pointing game", "iou_half": "IoU, half", "iou_share": "IoU, highest"}


def number_table(files: FigureFiles) -> Table:
    """One table for each kind of figure: a row for each weights, input or result."""
    header, rows = _ROWS[str(files.record["figure"])](files.numbers)
    columns = [
        Column(title, text=not place or not title, group=_GROUPS.get(title, "purity" if title.endswith("-NN") else ""))
        for place, title in enumerate(header)
    ]
    return table_of(columns, rows)


# What headings have in common stands above them, so that columns are narrow and names have room beside them.
_GROUPS = {"anatomy": "moved", "place": "moved"}


def _maps(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    first = next(iter(numbers.values()))
    moved = "moved_films" in first
    header = ["weights", "silhouette", *(f"{k}-NN" for k in first["purity"]), "chance"]
    header += ["anatomy", "place"] if moved else []
    rows = []
    for label, quality in numbers.items():
        purity = [f"{quality['purity'][k]['mean']:.3f}" for k in quality["purity"]]
        row = [label, f"{quality['silhouette']:.3f}", *purity, f"{quality['purity_by_chance']:.3f}"]
        rows.append(row + ([_percent(quality["moved_films"][k]) for k in ("anatomy", "place")] if moved else []))
    return header, rows


def _cam(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for label, metrics in numbers.items():
        for name, title in _SHORT.items():
            value = metrics[name]
            interval = f"{_text(value['low'])} to {_text(value['high'])}"
            cells = [_text(value["mean"]), interval, _text(value["chance"]), _text(value["maps_of_other_films"])]
            rows.append([label, title, *cells])
    return ["classifier", "", "mean", "95 %", "chance", "other films"], rows


def _restorations(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    titles = {"z_mask": "with z_mask", "all_seen": "nothing hidden", "untouched": "not restored"}
    rows = [
        [
            f"{name} input, {titles[way]}",
            *(_text(_thousand(errors[region]["mean"]), 2) for region in ("hidden_tokens", "elsewhere")),
        ]
        for name, ways in numbers.items()
        for way, errors in ways.items()
    ]
    return ["mean squared error x 1000", "hidden tokens", "elsewhere"], rows


def _atlas(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        ["mean entropy of a prototype (1 = uniform)", f"{numbers['mean_entropy']:.3f}"],
        ["clusters that are likeliest somewhere", f"{numbers['likeliest_clusters']} of {numbers['clusters']}"],
        ["closest patch at home", f"{_percent(numbers['at_home'])} (chance {_percent(numbers['at_home_by_chance'])})"],
        ["closest patch at home or beside", _percent(numbers["at_home_or_beside"])],
        ["Hellinger distance of the nearest patches", f"{numbers['nearest_distance']:.3f}"],
    ]
    return ["prototypes", "value"], rows


def _auc(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    labels = list(next(iter(numbers.values())))
    rows = [
        [label.replace("_", " "), *(_text(result[label]["mean"]) for result in numbers.values())] for label in labels
    ]
    return ["finding", *numbers], rows


_ROWS = {
    "tsne": _maps,
    "landmarks": _maps,
    "gradcam": _cam,
    "restorations": _restorations,
    "atlas": _atlas,
    "auc": _auc,
}


def _text(value: float | None, digits: int = 3) -> str:
    return number(float("nan") if value is None else value, digits)


def _thousand(value: float | None) -> float | None:
    return None if value is None else 1000 * value


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
