"""What a walk has made so far, and what must therefore be true: which films are where, and who has seen them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from afire.data.manifest import read_manifest
from tests.sequences.films import Source


@dataclass(frozen=True)
class Data:
    """Films as a command takes them: a manifest, a pack or a folder."""

    path: str
    source: Source
    manifest: str  # the file that lists them; empty for a folder, which lists itself
    words: tuple[str, ...] = ()  # the command that made it, without --out
    fit: str | None = None  # of a pack
    skipped: bool = False  # a pack that left out what cannot be read
    plain: bool = False  # the folder itself or a pack of it: nobody was told the patients and labels

    @property
    def knows_patients(self) -> bool:
        return self.source.knows_patients and not self.plain

    @property
    def reads_all(self) -> bool:
        """Whether every film of it can be read."""
        return self.skipped or not self.source.unreadable


@dataclass(frozen=True)
class SplitFile:
    """A split, and the films it was made for."""

    path: str
    data: Data

    def fits(self, data: Data) -> bool:
        """Whether it is one of these films, in whatever form."""
        mine, theirs = self.data.source, data.source
        same = mine.build == theirs.build and set(mine.films) == set(theirs.films)
        return same and bool(data.manifest) and (self.data.skipped, self.data.plain) == (data.skipped, data.plain)

    def is_foreign_to(self, data: Data) -> bool:
        return set(self.data.source.films) != set(data.source.films) and bool(data.manifest)


@dataclass(frozen=True)
class Weights:
    """A run, a detector or a bundle. ``seen`` are digests of the films behind it, None where it keeps no record."""

    path: str
    kind: str
    words: tuple[str, ...]
    data: Data
    seen: frozenset[str] | None
    fit: str
    method: str
    fitted: frozenset[str] | None = None  # of a detector: the films of its fit
    split: SplitFile | None = None
    start: Weights | None = None  # what it was made from


@dataclass(frozen=True)
class Made:
    """Any other output, and the command that made it."""

    path: str
    kind: str
    words: tuple[str, ...]


@dataclass
class World:
    """Everything there is in a walk's folder."""

    folder: Path
    sources: list[Source] = field(default_factory=list)
    data: list[Data] = field(default_factory=list)
    splits: list[SplitFile] = field(default_factory=list)
    runs: list[Weights] = field(default_factory=list)
    detectors: list[Weights] = field(default_factory=list)
    bundles: list[Weights] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)

    @property
    def outputs(self) -> list[str]:
        """Paths of all that commands wrote."""
        things: list[Any] = [*self.runs, *self.detectors, *self.bundles, *self.made, *self.splits, *self.data]
        inputs = {source.folder for source in self.sources}
        return [thing.path for thing in things if Path(thing.path).parts[0] not in inputs]

    def table(self, data: Data) -> pd.DataFrame:
        """The manifest of ``data``; a folder has only the names of its films."""
        if not data.manifest:
            return pd.DataFrame({"image": sorted(data.source.films), "split": "", "normal": float("nan")})
        return read_manifest(self.folder / data.manifest).table

    def subset(self, data: Data, split: SplitFile | None, name: str) -> pd.DataFrame:
        """Films of train, val or test: those of the split's patients, else those that are listed."""
        table = self.table(data)
        if split is None:
            return table[table["split"] == name] if (table["split"] != "").any() or name != "train" else table
        stored = json.loads((self.folder / split.path).read_text())
        rows = table[table["patient"].isin(stored["patients"][name])]
        return rows[rows["split"] != ""] if stored["scope"] == "listed" else rows

    def training_films(self, data: Data, split: SplitFile | None) -> frozenset[str]:
        """Digests of the films that a pre-training takes."""
        return self.digests(data, _normal(self.subset(data, split, "train")))

    def detection_films(self, data: Data, split: SplitFile | None) -> frozenset[str]:
        """Digests of the films that fit, choose and calibrate a detector."""
        train = self.training_films(data, split)
        return train if split is None else train | self.digests(data, _normal(self.subset(data, split, "val")))

    def digests(self, data: Data, table: pd.DataFrame) -> frozenset[str]:
        return frozenset(data.source.films[str(image)].digest for image in table["image"])


def _normal(table: pd.DataFrame) -> pd.DataFrame:
    return table if table["normal"].isna().all() else table[table["normal"] == 1]
